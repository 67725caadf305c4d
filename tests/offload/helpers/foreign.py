"""Models that others wrote, and the comparison of a mode with the resident model on them, call by call."""

import copy
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.streams.transfer import Counters
from tests.offload.helpers.models import under


class InBlock(nn.Module):
    """One module as the only block of a list, which is what modes that stream blocks look for."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.blocks = nn.ModuleList([module])

    def forward(self, *arguments: object, **keywords: object) -> object:
        return self.blocks[0](*arguments, **keywords)


def tensors_of(value: object) -> list[torch.Tensor]:
    """The floating-point tensors in nested lists, tuples and dictionaries, and in attributes of output objects."""
    leaves, _ = tree_flatten(value)
    found = []
    for leaf in leaves:
        if isinstance(leaf, torch.Tensor):
            found.append(leaf)
        elif hasattr(leaf, "__dict__"):
            found += [item for item in vars(leaf).values() if isinstance(item, torch.Tensor)]
    return found


def loss_of(output: object) -> torch.Tensor | None:
    """A loss that gives each element of each output its own gradient; None where nothing can be differentiated."""
    parts = []
    for tensor in tensors_of(output):
        if tensor.requires_grad and (tensor.is_floating_point() or tensor.is_complex()):
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            # Made on the host: the same numbers on every device.
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)
            parts.append((real * weights.to(real.device)).sum())
    return sum(parts[1:], parts[0]) if parts else None


def fresh(value: object, device: str = "cpu") -> object:
    """A copy on `device` of nested inputs whose tensors are leaves that keep gradients where the originals do."""

    def copied(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().to(device, copy=True).requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(copied, value)


def run_steps(
    model: nn.Module,
    calls: Sequence[tuple[tuple, dict]],
    attached: Mode,
    microbatches: int | None = None,
    device: str = "cpu",
) -> list[dict[str, object]]:
    """Trains `model` by plain SGD and returns what each step left: outputs, losses, gradients, buffers.

    `attached` is what `attach` returned. Each step makes one of `calls`, forward and backward by hand, or as many as
    there are `microbatches`, by `attached.accumulate`. Calls that are left over are not made.
    """
    records = []
    size = microbatches or 1
    for first in range(0, len(calls) - size + 1, size):
        given = [fresh(call, device) for call in calls[first : first + size]]
        outputs: list[list[torch.Tensor]] = [[] for _ in given]

        def compute(index: int, first: int = first, given: list = given, outputs: list = outputs):
            torch.manual_seed(first + index)
            arguments, keywords = given[index]
            output = model(*arguments, **keywords)
            outputs[index] = [tensor.detach().clone() for tensor in tensors_of(output)]
            return loss_of(output)

        with attached.step():
            if microbatches is not None:
                losses = attached.accumulate([partial(compute, index) for index in range(size)])
            else:
                losses = [compute(0)]
                if losses[0] is not None:
                    losses[0].backward()
        records.append(
            {
                "outputs": outputs,
                "losses": [None if loss is None else loss.detach() for loss in losses],
                "input gradients": [None if t.grad is None else t.grad.clone() for t in tensors_of(given)],
                "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
                "buffers": {n: b.clone() for n, b in model.named_buffers()},
            }
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    # A power of two: exact, so that host and GPU round alike.
                    parameter.sub_(parameter.grad / 128)
        model.zero_grad(set_to_none=True)
    return records


def assert_alike(found: object, expected: object, where: str = "", exact: bool = True) -> None:
    """Fails where two nested records differ in any bit, or by more than rounding."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_alike(found[key], expected[key], f"{where} {key}", exact)
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{where}[{index}]", exact)
    elif expected is None or found is None:
        assert found is expected, where
    else:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        found, expected = torch.nan_to_num(found.cpu()), torch.nan_to_num(expected.cpu())
        if exact:
            assert torch.equal(found, expected), where
        else:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=5e-4, msg=lambda text: f"{where}: {text}")


Trained = tuple[list[dict[str, object]], dict[str, torch.Tensor]]


def trained(
    model: nn.Module,
    mode: Mode,
    calls: Sequence[tuple[tuple, dict]],
    microbatches: int | None = None,
    device: str = "cpu",
) -> tuple[Trained, Counters]:
    """Returns the records of `run_steps` and the state after detach, and the counters of `mode`."""
    with under(mode, model, device) as attached:
        records = run_steps(model, calls, attached, microbatches, device)
        counters = attached.counters()
    return (records, {name: tensor.detach() for name, tensor in model.state_dict().items()}), counters


def same_as_resident(
    model: nn.Module,
    mode: Mode,
    calls: Sequence[tuple[tuple, dict]],
    microbatches: int | None = None,
    device: str = "cpu",
    exact: bool = True,
    expected: Trained | None = None,
) -> Counters:
    """`model` under `mode` computes the bits of its resident copy, and has its weights and buffers after detach.

    `exact`: False allows for sums in another order. `expected`: what the resident model computes, where it is known.
    Returns the counters of `mode`.
    """
    if expected is None:
        expected, _ = trained(copy.deepcopy(model), Resident(), calls, microbatches, device)
    found, counters = trained(model, mode, calls, microbatches, device)
    for one, other, where in zip(found, expected, ("", "after detach"), strict=True):
        assert_alike(one, other, where, exact)
    return counters
