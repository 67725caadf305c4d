"""Trains a small model with sharers, and with one process that computes what all of them do; compares gradients."""

import copy
from collections.abc import Callable, Sequence
from functools import cache, partial

import torch
from torch import Tensor, nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions, Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.formats import StateFormat
from offload.sharing.sharers import NO_SHARERS, Sharers, meet
from offload.streams.stream_checker import CheckedStreams
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.sharers import ThreadSharers, as_sharers

STEPS = 3


MODES = {
    "layer_stream": lambda: LayerStream(slots=2),
    "one slot": lambda: LayerStream(slots=1),
    "everything": lambda: LayerStream(slots=3, outside="stream"),
    "bounce_linear": BounceLinear,
    "shard_offload": lambda: ShardOffload(shards=2),
    "tensor_swap": lambda: TensorSwap(LayerStream(slots=2)),
    "none": Resident,
}


EARLY = [
    ("layer_stream", 2, torch.float32, 0),
    ("everything", 3, torch.bfloat16, 0),
    ("shard_offload", 2, torch.bfloat16, 0),
    ("one slot", 2, torch.bfloat16, 10**9),
]


def same_norm(one: torch.Tensor | None, two: torch.Tensor | None) -> bool:
    return one is two is None or (one is not None and two is not None and torch.equal(one, two))


def loss_of(model: nn.Module, step: int, microbatch: int) -> torch.Tensor:
    return model(stack_inputs(step, microbatch).to(next(model.parameters()).dtype)).float().square().mean()


def sum_rest(model: nn.Module, attached: Mode, sharers: ThreadSharers) -> None:
    """Makes gradients that are not yet the sums over the sharers, in the order of ranks."""
    done = attached.summed_parameters()
    rest = [parameter for parameter in model.parameters() if parameter.requires_grad and parameter not in done]
    everyone = sharers.laid_down([None if parameter.grad is None else parameter.grad.clone() for parameter in rest])
    with torch.no_grad():
        for parameter, *each in zip(rest, *everyone, strict=True):
            given = [gradient for gradient in each if gradient is not None]
            if not given:
                continue
            total = given[0].clone()
            for other in given[1:]:
                total += other
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.copy_(total)
    meet(sharers, "test")


def trained(
    model: nn.Module,
    mode: Mode,
    sharers: Sharers,
    count: int,
    *,
    early: bool = False,
    device_share: int = 0,
    scale: float = 0.5,
    takes_norms: bool = True,
    releases: bool = False,
    **format: str,
) -> dict:
    """Trains for some steps with one microbatch a sharer, of `count`. Returns losses, weights and states.

    `early`: updates may begin inside backward; then `scale` is 1.
    """
    streams = CheckedStreams(torch.device("cpu"))
    options = AttachOptions(sharers=sharers, state_format=StateFormat(**format), release_gradients=releases)
    attached = mode.attach(model, streams, options)
    try:
        optimizer = HostAdamW(model.parameters(), lr=0.05, threads=1, **format)
        attached.overlap(optimizer, early, device_share)
        optimizer.allocate()
        losses, begun = [], []
        for step in range(STEPS):
            own = [sharers.first + sharers.rank] if sharers.count > 1 else range(count)
            with attached.step(norms=takes_norms):
                losses += attached.accumulate([partial(loss_of, model, step, number) for number in own])
            norms = {name: attached.gradient_norms().get(p) for name, p in model.named_parameters()}
            if sharers.count > 1:
                sum_rest(model, attached, sharers)
            begun.append(optimizer.has_begun)
            optimizer.step(scale=scale)
            optimizer.zero_grad()
        optimizer.finish()
        optimizer.states.bring_home()
        meet(sharers, "test")
        with attached.inference():
            losses.append(loss_of(model, STEPS, 0))
        states = {
            f"{name}.{key}": value.clone()
            for name, parameter in model.named_parameters()
            for key, value in optimizer.state[parameter].items()
        }
        weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
        # Nobody goes on to unmap what another still compares.
        meet(sharers, "test")
        return {
            "losses": losses,
            "weights": weights,
            "states": states,
            "norms": norms,
            "begun": begun,
            "sums": attached.summed_parameters(),
            "asked": getattr(sharers, "sums", 0),
        }
    finally:
        attached.detach()


def stack(dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    torch.manual_seed(0)
    return Stack(depth=3).to(dtype)


def two_slots() -> Mode:
    return LayerStream(slots=2)


@cache
def alone(make: Callable[[], Mode], dtype: torch.dtype, total: int, options: tuple[tuple[str, object], ...]) -> dict:
    """Trains `stack(dtype)` with one process, once for all who share it in one way or another."""
    return trained(stack(dtype), make(), NO_SHARERS, total, **dict(options))


def compared(
    make: Callable[[], Mode], model: nn.Module | torch.dtype, count: int = 2, hosts: int = 1, **options
) -> tuple[dict, list[dict]]:
    """Trains with one process and with sharers; fails where a loss, a weight or a state differs in a bit.

    The model of a dtype is that of `stack`.
    """
    total = count * hosts
    own = {key: options[key] for key in ("scale", "master", "state_dtype") if key in options}
    if isinstance(model, torch.dtype):
        one, model = alone(make, model, total, tuple(own.items())), stack(model)
    else:
        one = trained(copy.deepcopy(model), make(), NO_SHARERS, total, **own)
    work = lambda sharers: trained(copy.deepcopy(model), make(), sharers, total, **options)  # noqa: E731
    several = as_sharers(count, work, hosts)
    # The losses of one process come by step, those of the sharers by sharer.
    for number, sharer in enumerate(several):
        expected = one["losses"][number:-1:total] + one["losses"][-1:]
        assert len(sharer["losses"]) == len(expected)
        assert all(map(torch.equal, sharer["losses"], expected)), number
        for key in ("weights", "states"):
            assert sharer[key].keys() == one[key].keys()
            assert all(torch.equal(value, one[key][which]) for which, value in sharer[key].items()), (number, key)
    return one, several


Losses = Sequence[Sequence[Callable[[nn.Module], Tensor]]]
"""of each step those of each process, called with its copy of the model"""
Gradients = dict[str, Tensor | None]


def same_as_one_process(model: nn.Module, make: Callable[[], Mode], losses: Losses) -> None:
    """Fails where a gradient of any step, without updates between, is not that of one process in every bit."""
    results = as_sharers(2, lambda sharers: _shared(sharers, model, make, losses))
    for step, of_step in enumerate(losses):
        expected = _alone(model, of_step)
        for found in results:
            for name, gradient in found[step].items():
                assert (gradient is None) == (expected[name] is None), (step, name)
                assert gradient is None or torch.equal(gradient, expected[name]), (step, name)


def _shared(sharers: ThreadSharers, model: nn.Module, make: Callable[[], Mode], losses: Losses) -> list[Gradients]:
    model, mode, found = copy.deepcopy(model), make(), []
    attached = mode.attach(model, CheckedStreams(torch.device("cpu")), AttachOptions(sharers=sharers))
    for of_step in losses:
        with attached.step():
            attached.accumulate([partial(of_step[sharers.number], model)])
        sum_rest(model, attached, sharers)
        found.append({n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()})
        sharers.laid_down(None)
        model.zero_grad(set_to_none=True)
    sharers.laid_down(None)
    attached.detach()
    return found


def _alone(model: nn.Module, losses: Sequence[Callable[[nn.Module], Tensor]]) -> Gradients:
    total: Gradients = {name: None for name, _ in model.named_parameters()}
    for loss in losses:
        mine = copy.deepcopy(model)
        loss(mine).backward()
        for name, parameter in mine.named_parameters():
            if parameter.grad is not None:
                total[name] = parameter.grad if total[name] is None else total[name] + parameter.grad
    return total
