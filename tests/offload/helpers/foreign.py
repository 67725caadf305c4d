"""Models that others wrote, and the comparison of a mode with the resident model on them, call by call."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import nullcontext

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

from offload.runtime import registry


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
            weights = torch.linspace(0.5, 1.5, real.numel(), dtype=real.dtype).view(real.shape)
            parts.append((real * weights).sum())
    return sum(parts[1:], parts[0]) if parts else None


def fresh(value: object) -> object:
    """A copy of nested inputs whose tensors are leaves that keep gradients where the originals do."""

    def copied(leaf: object) -> object:
        if isinstance(leaf, torch.Tensor):
            return leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return leaf

    return tree_map(copied, value)


def run_steps(
    model: nn.Module, calls: Iterable[tuple[tuple, dict]], step: Callable, lr: float = 0.01
) -> list[dict[str, object]]:
    """Trains `model` by plain SGD for one step of each of `calls`, and returns what each step left.

    `step` is a context for forward and backward: a mode's, or a null context for the resident model.
    """
    records = []
    for number, (arguments, keywords) in enumerate(calls):
        arguments, keywords = fresh(arguments), fresh(keywords)
        torch.manual_seed(number)
        with step():
            output = model(*arguments, **keywords)
            loss = loss_of(output)
            if loss is not None:
                loss.backward()
            outputs = [tensor.detach().clone() for tensor in tensors_of(output)]
        inputs = tensors_of((arguments, keywords))
        records.append(
            {
                "outputs": outputs,
                "input gradients": [None if t.grad is None else t.grad.clone() for t in inputs],
                "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
                "buffers": {n: b.clone() for n, b in model.named_buffers()},
            }
        )
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(lr * parameter.grad)
        model.zero_grad(set_to_none=True)
    return records


def assert_alike(found: object, expected: object, where: str = "") -> None:
    """Fails where two nested records differ in any bit."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys(), where
        for key in expected:
            assert_alike(found[key], expected[key], f"{where} {key}")
    elif isinstance(expected, list):
        assert len(found) == len(expected), where
        for index, (one, other) in enumerate(zip(found, expected, strict=True)):
            assert_alike(one, other, f"{where}[{index}]")
    elif expected is None or found is None:
        assert found is expected, where
    else:
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape), where
        assert torch.equal(torch.nan_to_num(found.cpu()), torch.nan_to_num(expected.cpu())), where


def same_as_resident(model: nn.Module, mode, calls: list[tuple[tuple, dict]], device: str = "cpu") -> None:
    """`model` under `mode` computes the bits of its resident copy, and has its weights and buffers after detach."""

    twin = copy.deepcopy(model)
    expected = run_steps(twin, calls, nullcontext)
    streams = registry.acquire(device)
    try:
        mode.attach(model, streams)
        try:
            found = run_steps(model, calls, mode.step)
        finally:
            mode.detach()
    finally:
        registry.release(streams)
    assert_alike(found, expected)
    assert_alike(
        {name: tensor.detach() for name, tensor in model.state_dict().items()},
        {name: tensor.detach() for name, tensor in twin.state_dict().items()},
        "after detach",
    )
