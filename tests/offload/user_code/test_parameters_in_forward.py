"""A forward does more with its parameters than compute with them: as under a resident model, in every mode."""

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import (
    EVERY_MODE,
    as_resident,
    same_as_resident,
    stack_of,
    three_steps,
    train_step,
    under,
)

pytestmark = pytest.mark.usefixtures("device")


def gradients(model: nn.Module) -> list[torch.Tensor | None]:
    return [None if p.grad is None else p.grad.detach().clone() for p in model.parameters()]


class Linear16(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)


class Hooking(Linear16):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.weight.register_hook(lambda gradient: gradient * 0.5)
        return super().forward(hidden)


@EVERY_MODE
def test_what_only_a_leaf_can_do_is_refused_in_a_forward(make: Callable):
    """tests/offload/weights/windows/test_stand_in_class.py has all that only a leaf can do."""
    model, mode = stack_of(Hooking)(), make()
    refusal = pytest.raises(RuntimeError, match=r"^a weight that streams .* inside a forward")
    with under(mode, model) as attached, refusal as refused:
        train_step(model, attached)
    assert "\n" not in str(refused.value)


@EVERY_MODE
def test_attributes_that_a_forward_sets_on_a_parameter_stay(make: Callable):
    class Marks(Linear16):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            self.weight.mark = hidden.shape[0]
            return super().forward(hidden) * getattr(self.weight, "scale", 1.0)

    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        seen = [train_step(model, attached)]
        model.blocks[1].weight.scale = 2.0
        with attached.step():
            model(stack_inputs(1, 0)).sum().backward()
            model.blocks[0].weight.scale = 3.0
            model(stack_inputs(1, 1)).sum().backward()
        return [*seen, *gradients(model), *(torch.tensor(block.weight.mark) for block in model.blocks)]

    same_as_resident(make, scenario, stack_of(Marks))


@EVERY_MODE
@as_resident()
def test_gradients_with_a_graph_of_their_own(model: nn.Module, attached) -> list[torch.Tensor]:
    """`backward(create_graph=True)`, and a penalty on the gradients."""
    with attached.step():
        model(stack_inputs(0, 0)).square().mean().backward(create_graph=True)
        penalty = sum(parameter.grad.square().sum().cpu() for parameter in model.parameters())
        for parameter in model.parameters():
            parameter.grad = None
        other = model(stack_inputs(0, 1)).square().mean()
        (other + penalty.to(other.device)).backward()
    return [penalty.detach().clone(), *gradients(model)]


class InBfloat16(Stack):
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs.bfloat16())


@EVERY_MODE
def test_gradients_of_another_dtype_are_added_to(make: Callable):
    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.grad_dtype = None
            parameter.grad = torch.full_like(parameter, 1e-3, dtype=torch.float32)
        with attached.step():
            for microbatch in range(2):
                model(stack_inputs(0, microbatch)).float().square().mean().backward()
        return gradients(model)

    if not hasattr(torch.Tensor, "grad_dtype"):
        pytest.skip("this torch has one dtype for a parameter and its gradient")
    same_as_resident(make, scenario, lambda: InBfloat16().bfloat16())


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="this torch has one dtype for both")
def test_a_parameter_that_wants_gradients_of_another_dtype_is_refused():
    model, mode = InBfloat16().bfloat16(), LayerStream()
    model.blocks[0].up.weight.grad_dtype = torch.float32
    with (
        under(mode, model) as attached,
        pytest.raises(RuntimeError, match=r"^blocks\.0\.up\.weight has grad_dtype torch\.float32"),
    ):
        attached.step().__enter__()


@EVERY_MODE
def test_a_state_dict_that_is_made_inside_a_forward(make: Callable):
    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        if make().recomputes:
            pytest.skip("the hook runs in the recompute, too")
        found = []
        handle = model.blocks[1].register_forward_hook(lambda block, *_: found.append(block.state_dict()))
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        handle.remove()
        return list(found[0].values())

    same_as_resident(make, scenario)


@EVERY_MODE
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@as_resident()
def test_a_fused_optimizer_inside_a_step(model: nn.Module, attached, kind: type) -> list[torch.Tensor]:
    """Its kernels raise no version counter."""
    if len({parameter.device for parameter in model.parameters()}) > 1:
        pytest.skip("each device of a fused optimizer rounds in its own way")
    optimizer = kind(model.parameters(), lr=0.1, fused=True)
    seen = []
    with attached.step():
        for microbatch in range(3):
            loss = model(stack_inputs(0, microbatch)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.detach())
    return seen


@EVERY_MODE
def test_a_class_that_a_layer_gets_while_attached(make: Callable):
    class Half(nn.Linear):
        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden) * 0.5

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        model.blocks[1].up.__class__ = Half
        return [*seen, train_step(model, mode, 1)]

    same_as_resident(make, scenario)


def test_a_buffer_that_requires_a_gradient_is_refused():
    model = Stack()
    model.blocks[0].register_buffer("gain", torch.ones(16, requires_grad=True))
    with pytest.raises(ValueError, match=r"^blocks\.0\.gain is a buffer that requires a gradient"):
        LayerStream().footprint(model)


@EVERY_MODE
@pytest.mark.parametrize("how", ["one parameter", "the same data"])
def test_weights_that_are_tied_while_attached_are_refused(make: Callable, how: str):
    model, mode = Stack(), make()
    with under(mode, model) as attached:
        train_step(model, attached)
        first, last = model.blocks[0].up, model.blocks[3].up
        if how == "one parameter":
            last.weight = first.weight
        else:
            last.weight.data = first.weight.data
        with pytest.raises(RuntimeError, match=r"^blocks\.0\.up\.weight and blocks\.3\.up\.weight share memory"):
            train_step(model, attached)
        last.weight = nn.Parameter(copy.deepcopy(first.weight.detach()))
        train_step(model, attached)


@EVERY_MODE
def test_data_given_between_forward_and_backward_is_refused(make: Callable):
    """A resident model would compute some gradients with the old and some with the new values."""
    model, mode = Stack(), make()
    if mode.recomputes:
        pytest.skip("it computes with the new values, as activation checkpoints do")
    with under(mode, model) as attached, attached.step():
        loss = model(stack_inputs(0, 0)).sum()
        for parameter in model.parameters():
            parameter.data = parameter.data * 0.9
        with pytest.raises(RuntimeError, match=r"needed for gradient computation, has been modified since forward"):
            loss.backward()


class Renorms(nn.Module):
    """Changes its weight in forward, each time a little."""

    def __init__(self):
        super().__init__()
        self.inner = Linear16()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.inner.weight.mul_(0.9)
        return F.gelu(self.inner(hidden))


def test_a_weight_that_a_recompute_would_change_again_is_refused():
    same_as_resident(LayerStream, three_steps, stack_of(Renorms))
    model, mode = stack_of(Renorms)(), ShardOffload(shards=2)
    with (
        under(mode, model) as attached,
        pytest.raises(RuntimeError, match=r"^blocks\.3\.inner\.weight was changed by a forward"),
    ):
        train_step(model, attached)


TRANSFORMS = {
    "grad": lambda model, x: torch.func.grad(lambda x: model(x).sum())(x),
    "jvp": lambda model, x: torch.func.jvp(model, (x,), (x,)),
    "per-sample": lambda model, x: torch.func.vmap(torch.func.grad(lambda x: model(x).sum()))(x),
    "vmap": lambda model, x: torch.no_grad()(torch.func.vmap(model))(x),
}


@EVERY_MODE
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_transforms_of_torch_func_are_refused_in_one_line(make: Callable, transform: Callable):
    model, mode = Stack(), make()
    with under(mode, model) as attached:
        with (
            attached.step(),
            pytest.raises(RuntimeError, match=r"^torch\.func .* do not work on a model whose weights"),
        ):
            transform(model, stack_inputs(0, 0))
        train_step(model, attached)
        transform(copy.deepcopy(model).to(stack_inputs(0, 0).device), stack_inputs(0, 0))
