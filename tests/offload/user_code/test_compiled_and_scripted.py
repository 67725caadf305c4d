"""torch.compile and TorchScript under a mode: windows run as they are, the rest as it was compiled."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from offload.activations.checkpointing import recompute
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import (
    EVERY_MODE,
    EVERY_MODE_OR_NONE,
    RESIDENT_MODES,
    Chain,
    NoMode,
    as_resident,
    same_as_resident,
    three_steps,
    train_step,
    under,
)

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.slow]

# Traces the model and the backward pass as inductor does, and makes no code.
BACKEND = "aot_eager"


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    with warnings.catch_warnings():
        # What torch says of graphs that it breaks.
        warnings.simplefilter("ignore")
        torch.compiler.reset()
        yield
        torch.compiler.reset()


def small() -> nn.Module:
    return Stack(depth=2)


def accumulated(model: Callable, attached, parameters: list) -> list[torch.Tensor]:
    """Two microbatches in the order of the mode."""
    losses = [lambda number=number: model(stack_inputs(9, number)).square().mean() for number in range(2)]
    with attached.step():
        if attached is NoMode:
            for loss in losses:
                loss().backward()
        else:
            attached.accumulate(losses)
    return [p.grad.clone() for p in parameters]


def trained(model: Callable, mode) -> list[torch.Tensor]:
    return [*three_steps(model, mode), *accumulated(model, mode, list(model.parameters()))]


@EVERY_MODE_OR_NONE
@as_resident(small)
def test_a_model_compiled_under_a_mode(model: nn.Module, mode) -> list[torch.Tensor]:
    return trained(torch.compile(model, backend=BACKEND), mode)


@EVERY_MODE
@as_resident(small)
def test_blocks_compiled_under_a_mode(model: nn.Module, mode) -> list[torch.Tensor]:
    for block in model.blocks:
        block.compile(backend=BACKEND)
    return trained(model, mode)


def model_compiled() -> nn.Module:
    return torch.compile(small(), backend=BACKEND)


def blocks_compiled() -> nn.Module:
    model = small()
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend=BACKEND)
    return model


@EVERY_MODE
@pytest.mark.parametrize("build", [model_compiled, blocks_compiled])
def test_compiled_before_a_mode_is_attached(make: Callable, build: Callable[[], nn.Module]):
    same_as_resident(make, trained, build)


@pytest.mark.parametrize("make", [LayerStream, RESIDENT_MODES["tensor_swap"]])
@as_resident(small)
def test_a_compiled_function_that_has_the_backward_pass_in_it(model: nn.Module, attached) -> list[torch.Tensor]:
    @torch.compile(backend=BACKEND)
    def passes(inputs: torch.Tensor) -> torch.Tensor:
        loss = model(inputs).square().mean()
        loss.backward()
        return loss

    with attached.step():
        loss = passes(stack_inputs(0, 0))
    return [loss.detach(), *(p.grad.clone() for p in model.parameters())]


def test_activations_of_compiled_code_are_swapped():
    model, mode = small(), TensorSwap(RESIDENT_MODES["none"]())
    with under(mode, model) as attached:
        train_step(torch.compile(model, backend=BACKEND), attached)
        assert attached.counters().swapped_bytes > 0


def scripted() -> nn.Module:
    return Chain([nn.Sequential(torch.jit.script(nn.Linear(8, 8)), nn.Linear(8, 8)) for _ in range(2)])


def traced() -> nn.Module:
    return Chain([torch.jit.trace(nn.Linear(8, 8), stack_inputs(0, 0)) for _ in range(2)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("build", [scripted, traced])
@pytest.mark.parametrize("attach", [LayerStream, BounceLinear, None])
def test_scripted_and_traced_modules_are_refused(attach: Callable | None, build: Callable[[], nn.Module]):
    model = build()
    with pytest.raises(ValueError, match=r"^[\w.]+ is a scripted module, .*: leave torch.jit out") as refused:
        recompute(model.blocks) if attach is None else attach().footprint(model)
    assert "\n" not in str(refused.value)
    assert not any("forward" in vars(block) for block in model.blocks)


EXPORTS = {"script": torch.jit.script, "export": lambda model: torch.export.export(model, (stack_inputs(0, 0),))}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@EVERY_MODE
@pytest.mark.parametrize("export", EXPORTS.values(), ids=EXPORTS)
def test_an_attached_model_is_not_scripted_or_exported_but_its_copy(make: Callable, export: Callable):
    model, mode = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), make()
    with under(mode, model) as attached:
        with pytest.raises(AttributeError, match=r"^the forward of \w+ is replaced by an offload mode .* a copy"):
            export(model)
        # The copy's weights are where those of the mode are, on the host.
        export(copy.deepcopy(model).to(stack_inputs(0, 0).device))
        train_step(model, attached)
