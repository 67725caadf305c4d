"""Scenarios of user code around a step, run with a mode and resident: both must see the same tensors."""

import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

import pytest
import torch
from torch import nn

from offload.activations.checkpointing import recompute
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers import models
from tests.offload.helpers.models import Stack, same_bits, stack_inputs

MODES = {
    "bounce_linear": lambda: BounceLinear(outside="stream", slots=8),
    "layer_stream": LayerStream,
    "shard_offload": lambda: ShardOffload(shards=2),
    "layer_stream_swap": lambda: TensorSwap(LayerStream()),
}
# Those too under which the weights, or the norms, stay on the device.
RESIDENT_MODES = {
    "none": Resident,
    "bounce_linear_resident": lambda: BounceLinear(slots=8),
    "tensor_swap": lambda: TensorSwap(Resident()),
    "save_on_cpu": lambda: SaveOnCpu(Resident()),
}
EVERY_MODE = pytest.mark.parametrize("make", MODES.values(), ids=MODES.keys())
EVERY_MODE_OR_NONE = pytest.mark.parametrize(
    "make", (MODES | RESIDENT_MODES).values(), ids=(MODES | RESIDENT_MODES).keys()
)
# Where scenarios run; a fixture of theirs sets it.
DEVICE = "cpu"
# A scenario uses a model that is attached, and what `attach` returned, and returns what it saw.
Scenario = Callable[[nn.Module, object], list[torch.Tensor | None]]


def on_device() -> AbstractContextManager:
    """For tensors made on the device of the scenarios. On the CPU they are; torch would look at each call, a sixth."""
    return nullcontext() if DEVICE == "cpu" else torch.device(DEVICE)


@contextmanager
def under(mode, model: nn.Module) -> Iterator[Attached]:
    """Attaches `mode` to `model` on the device of the scenarios, on which tensors are made meanwhile."""
    with models.under(mode, model, DEVICE) as attached, on_device():
        yield attached


class Chain(nn.Module):
    """Blocks, one after another."""

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def stack_of(block: Callable[[], nn.Module], count: int = 4) -> Callable[[], nn.Module]:
    """Returns a function that builds a `Stack` of such blocks, of width 16."""

    def build() -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList(block() for _ in range(count))
        return model

    return build


class NoMode:
    """The resident model: a step is nothing special."""

    step = nullcontext
    inference = torch.no_grad


def evaluate(model: nn.Module, inputs: torch.Tensor | None = None) -> torch.Tensor:
    with torch.no_grad():
        return model(stack_inputs(0, 0) if inputs is None else inputs)


def descend(model: nn.Module) -> None:
    """Plain SGD on the gradients that are there, which are dropped."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.sub_(0.1 * parameter.grad)
    model.zero_grad()


def train_step(model: nn.Module, attached, step: int = 0, inputs: torch.Tensor | None = None) -> torch.Tensor:
    """One step of plain SGD; returns the loss."""
    with attached.step():
        loss = model(stack_inputs(step, 0) if inputs is None else inputs).square().mean()
        loss.backward()
    descend(model)
    return loss.detach()


def three_steps(model: nn.Module, mode) -> list[torch.Tensor]:
    """Three such steps; returns their losses."""
    return [train_step(model, mode, step) for step in range(3)]


@contextmanager
def recomputed(model: nn.Module, mode) -> Iterator[None]:
    """Computes blocks of a model that is attached again in backward."""
    undo = recompute(model.blocks) if mode is not NoMode else None
    yield
    if undo is not None:
        undo()


def _built(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build()


def same_as_resident(make: Callable, scenario: Scenario, build: Callable[[], nn.Module] = Stack) -> None:
    """`scenario` returns the same tensors with the model attached and resident, and leaves the same state."""
    model, twin = _built(build), _built(build).to(DEVICE)
    torch.manual_seed(1)
    with on_device():
        expected = scenario(twin, NoMode)
    torch.manual_seed(1)
    mode = make()
    with under(mode, model) as attached:
        found = scenario(model, attached)
    assert len(found) == len(expected)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        if one is None or other is None:
            assert one is other, f"item {index}"
            continue
        assert alike(one, other), f"item {index}: {one} instead of {other}"
    ours, theirs = model.state_dict(), twin.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert alike(tensor, theirs[name]), f"{name} after detach"


def as_resident(build: Callable[[], nn.Module] = Stack) -> Callable[[Callable], Callable]:
    """Makes a test of a scenario, of which further parameters are those of the test: see `same_as_resident`."""

    def decorate(scenario: Callable) -> Callable:
        def test(make: Callable, **parameters: object) -> None:
            same_as_resident(make, partial(scenario, **parameters), build)

        _, _, *further = inspect.signature(scenario).parameters.values()
        make = inspect.Parameter("make", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        test.__signature__ = inspect.Signature([make, *further])
        test.__name__, test.__doc__ = scenario.__name__, scenario.__doc__
        return test

    return decorate


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit for bit on the CPU. On a GPU user code works on weights on the host, which may round otherwise."""
    if DEVICE == "cpu":
        return same_bits(one, other)
    return torch.allclose(one.cpu(), other.cpu(), rtol=1e-3, atol=1e-5)
