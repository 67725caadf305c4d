"""Users change weights between steps and inside: swapped data, replaced parameters, closures, frozen parts."""

from collections.abc import Callable
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, as_resident, descend, evaluate, same_as_resident, train_step

pytestmark = pytest.mark.usefixtures("device")


@EVERY_MODE
@pytest.mark.parametrize("backup_is_a_copy", [False, True])
@as_resident()
def test_data_swapped_for_an_evaluation_and_back(model: nn.Module, mode, backup_is_a_copy: bool) -> list[torch.Tensor]:
    """As averaged weights (EMA) and PEFT's safe merge do."""
    seen = [train_step(model, mode)]
    backup = [p.data.clone() if backup_is_a_copy else p.data for p in model.parameters()]
    halve_data(model)
    seen.append(evaluate(model))
    for parameter, data in zip(model.parameters(), backup, strict=True):
        parameter.data = data
    return [*seen, evaluate(model), train_step(model, mode, 1), evaluate(model)]


def halve_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data * 0.5


def assign_a_state_dict(model: nn.Module) -> None:
    state = {name: tensor.clone() * 0.5 for name, tensor in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace_parameters(model: nn.Module) -> None:
    model.blocks[1].up.weight = nn.Parameter(model.blocks[1].up.weight.detach() * 0.5)
    model.stem.weight = nn.Parameter(model.stem.weight.detach() * 2)


@EVERY_MODE
@pytest.mark.parametrize("change", [halve_data, assign_a_state_dict, replace_parameters])
@as_resident()
def test_other_values_are_trained_on(model: nn.Module, mode, change: Callable) -> list[torch.Tensor]:
    seen = [train_step(model, mode)]
    change(model)
    return [*seen, evaluate(model), train_step(model, mode, 1), evaluate(model)]


def given(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: (p.detach() * 0.5).requires_grad_() for name, p in model.named_parameters()}


@EVERY_MODE
@as_resident()
def test_functional_call_computes_with_the_given_values(model: nn.Module, mode) -> list[torch.Tensor]:
    with torch.no_grad():
        seen = torch.func.functional_call(model, given(model), (stack_inputs(0, 0),))
    return [seen, evaluate(model), train_step(model, mode)]


# Not under shard_offload: as under every activation checkpoint, the recompute finds the values gone.
@pytest.mark.parametrize("make", [lambda: BounceLinear(outside="stream", slots=8), LayerStream])
@as_resident()
def test_functional_call_gives_its_values_gradients(model: nn.Module, attached) -> list[torch.Tensor]:
    other = given(model)
    with attached.step():
        loss = torch.func.functional_call(model, other, (stack_inputs(0, 0),)).square().mean()
        loss.backward()
    assert all(p.grad is None for p in model.parameters())
    return [loss.detach(), *(p.grad for p in other.values()), evaluate(model)]


def transpose_data(model: nn.Module) -> None:
    for block in model.blocks:
        block.weight.data = block.weight.data.t()


def transpose_in_place(model: nn.Module) -> None:
    with torch.no_grad():
        for block in model.blocks:
            block.weight.t_()


def transpose_parameters(model: nn.Module) -> None:
    for block in model.blocks:
        block.weight = nn.Parameter(block.weight.detach().t())


def expand_data(model: nn.Module) -> None:
    for block in model.blocks:
        block.weight.data = block.weight.data[:1].expand(16, 16)


def squares() -> nn.Module:
    model = Stack()
    model.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
    return model


@EVERY_MODE
@pytest.mark.parametrize("change", [transpose_data, transpose_in_place, transpose_parameters, expand_data])
@pytest.mark.parametrize("inside_a_step", [False, True])
def test_the_same_memory_in_another_order(make: Callable, change: Callable, inside_a_step: bool):
    """Nothing but its strides tells it from the data that was there."""
    if inside_a_step and change is not transpose_data:
        pytest.skip("one of them shows that strides are looked at in a step")

    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        seen, backup = [train_step(model, attached)], [p.data for p in model.parameters()]
        with attached.step() if inside_a_step else nullcontext(), torch.no_grad():
            seen.append(model(stack_inputs(1, 0)))
            change(model)
            seen.append(model(stack_inputs(1, 0)))
        if change is expand_data:
            for parameter, data in zip(model.parameters(), backup, strict=True):
                parameter.data = data
        return [*seen, train_step(model, attached, 1), evaluate(model)]

    same_as_resident(make, scenario, squares)


@EVERY_MODE
@pytest.mark.parametrize("how", ["functional_call", "those of another block", "new parameters", "its own state"])
@as_resident()
def test_values_that_lie_in_the_memory_of_the_weights(model: nn.Module, attached, how: str) -> list[torch.Tensor]:
    seen, values = [train_step(model, attached)], {name: p.detach() for name, p in model.named_parameters()}
    if how == "functional_call":
        with attached.step(), torch.no_grad():
            seen.append(torch.func.functional_call(model, values, (stack_inputs(0, 0),)))
    elif how == "those of another block":
        other = {name: values[name.replace("0", "1")] for name in values if name.startswith("blocks.0")}
        with torch.no_grad():
            seen.append(torch.func.functional_call(model, other, (stack_inputs(0, 0),)))
    elif how == "new parameters":
        for module in model.modules():
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.data))
    else:
        model.load_state_dict(model.state_dict(), assign=True)
    return [*seen, evaluate(model), train_step(model, attached, 1), evaluate(model)]


class Normed(nn.Module):
    """Its forward changes buffers and, where it is not computed again, a weight."""

    def __init__(self, max_norm: float | None):
        super().__init__()
        self.linear, self.norm = nn.Linear(16, 16), nn.BatchNorm1d(16)
        self.table = nn.Embedding(5, 16, max_norm=max_norm)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.norm(self.linear(hidden))) + self.table(torch.arange(5, device=hidden.device))


@EVERY_MODE
@pytest.mark.parametrize("inside_a_step", [False, True])
def test_a_forward_changes_data_that_it_was_given(make: Callable, inside_a_step: bool):
    """The change is made to that data, and not to the memory where the tensor was before."""

    def build() -> nn.Module:
        model = Stack()
        model.blocks = nn.ModuleList(Normed(None if make().recomputes else 0.5) for _ in range(3))
        return model

    def scenario(model: nn.Module, attached) -> list[torch.Tensor]:
        seen, tensors = [train_step(model, attached)], [*model.parameters(), *model.buffers()]
        backup, given = [t.data for t in tensors], [t.data * 2 for t in tensors]
        with attached.step() if inside_a_step else nullcontext():
            for tensor, data in zip(tensors, given, strict=True):
                tensor.data = data
            seen += [evaluate(model), evaluate(model)]
        seen += [t.detach().clone() for t in tensors]
        for tensor, data in zip(tensors, backup, strict=True):
            tensor.data = data
        return [*seen, evaluate(model), train_step(model, attached, 1), evaluate(model)]

    same_as_resident(make, scenario, build)


@EVERY_MODE
@as_resident()
def test_a_closure_that_runs_several_times_in_one_step(model: nn.Module, attached) -> list[torch.Tensor]:
    """LBFGS with the step around it."""
    if len({parameter.device for parameter in model.parameters()}) > 1:
        pytest.skip("torch's LBFGS takes parameters of one device only")
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=4, line_search_fn="strong_wolfe")
    seen = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(stack_inputs(0, 0)).square().mean()
        loss.backward()
        seen.append(loss.detach())
        return loss

    for _ in range(2):
        with attached.step():
            optimizer.step(closure)
    return [*seen, evaluate(model)]


@EVERY_MODE
@as_resident()
def test_weights_perturbed_between_two_passes(model: nn.Module, attached) -> list[torch.Tensor]:
    """Sharpness-aware minimisation (SAM)."""
    seen = []
    for step in range(2):
        with attached.step():
            model(stack_inputs(step, 0)).square().mean().backward()
            with torch.no_grad():
                moves = [0.05 * p.grad for p in model.parameters()]
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.add_(move)
            model.zero_grad()
            loss = model(stack_inputs(step, 1)).square().mean()
            loss.backward()
            with torch.no_grad():
                for parameter, move in zip(model.parameters(), moves, strict=True):
                    parameter.sub_(move)
        seen.append(loss.detach())
        descend(model)
    return [*seen, evaluate(model)]


@EVERY_MODE
@as_resident()
def test_frozen_and_unfrozen_within_a_step(model: nn.Module, attached) -> list[torch.Tensor]:
    """As the two networks of a GAN take turns."""
    seen = []
    for step in range(2):
        model.requires_grad_(False)
        with attached.step():
            inputs = stack_inputs(step, 0).requires_grad_()
            model(inputs).square().mean().backward()
            model.requires_grad_(True)
            loss = model(stack_inputs(step, 1)).square().mean()
            loss.backward()
        seen += [loss.detach(), inputs.grad, *(p.grad.clone() for p in model.parameters())]
        model.zero_grad()
    return seen


# Not under shard_offload: as under every activation checkpoint, the recompute would find other tensors to save.
@pytest.mark.parametrize("make", [BounceLinear, LayerStream])
@as_resident()
def test_frozen_between_forward_and_backward(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        model.blocks[1].requires_grad_(False)
        loss.backward()
    model.blocks[1].requires_grad_(True)
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@EVERY_MODE
def test_a_parameter_that_was_frozen_when_attached_trains_later(make: Callable):
    def build() -> Stack:
        model = Stack()
        model.blocks[1].requires_grad_(False)
        return model

    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        model.blocks[1].requires_grad_(True)
        return [*seen, train_step(model, mode, 1), train_step(model, mode, 2)]

    same_as_resident(make, scenario, build)


@EVERY_MODE
@pytest.mark.parametrize("microbatches", [1, 2])
@as_resident()
def test_a_loss_that_uses_weights_directly(model: nn.Module, attached, microbatches: int) -> list[torch.Tensor]:
    """Weight decay as part of the loss: its gradient is computed where the weight is, outside of forward."""
    seen = []
    for step in range(3):
        with attached.step():
            for microbatch in range(microbatches):
                loss = model(stack_inputs(step, microbatch)).square().mean()
                decay = [p.square().sum() for p in model.parameters()]
                for part in (*decay, model.blocks[1].up.weight.abs().sum()):
                    loss = loss + 0.01 * part.to(loss.device)
                loss.backward()
        seen += [loss.detach(), *(p.grad.clone() for p in model.parameters())]
        descend(model)
    return seen
