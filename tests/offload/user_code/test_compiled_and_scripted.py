"""torch.compile and TorchScript under a mode: windows run as they are, the rest as it was compiled."""

import copy
import warnings
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

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


def layer() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Tanh())


def scripted() -> nn.Module:
    return Chain([torch.jit.script(layer()) for _ in range(4)])


def scripted_inside() -> nn.Module:
    return Chain([nn.Sequential(torch.jit.script(layer()), nn.Linear(8, 8)) for _ in range(4)])


def traced() -> nn.Module:
    return Chain([torch.jit.trace(nn.Sequential(nn.Linear(8, 8), nn.Tanh()), stack_inputs(0, 0)) for _ in range(4)])


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("build", [scripted, scripted_inside, traced])
def test_scripted_and_traced_blocks(make: Callable, build: Callable[[], nn.Module]):
    # Without what TorchScript does to a graph that ran several times, which differs from run to run.
    with torch.jit.optimized_execution(False):
        same_as_resident(make, three_steps, build)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [RESIDENT_MODES["tensor_swap"], RESIDENT_MODES["save_on_cpu"]])
def test_a_scripted_model_takes_no_hooks(make: Callable):
    model, mode = torch.jit.script(Chain([layer(), layer()])), make()
    message = r"^Chain is a scripted module, which takes no hooks: "
    with pytest.raises(RuntimeError, match=message) as refused, under(mode, model):
        pass
    assert "\n" not in str(refused.value)
    # Nothing is left of the attempt.
    with under(RESIDENT_MODES["none"](), model):
        pass


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_scripted_module_streams_as_a_whole_or_not():
    model = scripted_inside()
    whole = model.blocks[0][0]
    units = BounceLinear(outside="stream").footprint(model).trained
    assert [set(whole.parameters()) <= set(unit) for unit in units].count(True) == 1
    model.head = torch.jit.script(layer())
    with pytest.raises(
        ValueError, match=r"^head\.0 is a scripted module, which streams as a whole or not: `exclude` it$"
    ):
        LayerStream(outside="stream").footprint(model)
    assert LayerStream(outside="stream", exclude=["head.*"]).footprint(model).units == 4


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
