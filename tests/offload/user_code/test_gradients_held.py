"""Gradients that users keep, assign, ask autograd for, or hook."""

import pytest
import torch
from torch import nn

from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, as_resident, evaluate

pytestmark = pytest.mark.usefixtures("device")


def backward(model: nn.Module, attached, step: int) -> None:
    with attached.step():
        model(stack_inputs(step, 0)).square().mean().backward()


@EVERY_MODE
@pytest.mark.parametrize("view", [False, True])
@as_resident()
def test_a_gradient_that_is_still_held_is_not_overwritten(model: nn.Module, mode, view: bool) -> list[torch.Tensor]:
    backward(model, mode, 0)
    held = [p.grad[:1] if view else p.grad for p in model.parameters()]
    model.zero_grad()
    backward(model, mode, 1)
    return [*held, *(p.grad.clone() for p in model.parameters())]


@EVERY_MODE
@as_resident()
def test_an_assigned_gradient_is_added_to_in_place(model: nn.Module, mode) -> list[torch.Tensor]:
    assigned = [torch.ones_like(p) for p in model.parameters()]
    for parameter, gradient in zip(model.parameters(), assigned, strict=True):
        parameter.grad = gradient
    backward(model, mode, 0)
    assert all(p.grad is gradient for p, gradient in zip(model.parameters(), assigned, strict=True))
    return assigned


@EVERY_MODE
@as_resident()
def test_gradients_asked_of_autograd(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
    assert all(p.grad is None for p in model.parameters())
    return list(found)


@EVERY_MODE
@as_resident()
def test_backward_for_some_inputs_alone(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        loss.backward(inputs=list(model.blocks.parameters()))
    return [None if p.grad is None else p.grad.clone() for p in model.parameters()]


@EVERY_MODE
@as_resident()
def test_hooks_registered_before_and_after_forward(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    first, last = model.blocks[0].up.weight, model.blocks[3].down.weight
    handles = [first.register_hook(lambda gradient: gradient * 2)]
    handles.append(
        torch.autograd.graph.register_multi_grad_hook(
            [first, last], lambda gradients: seen.extend(g.clone() for g in gradients)
        )
    )
    with attached.step():
        loss = model(stack_inputs(0, 0)).square().mean()
        handles.append(last.register_hook(lambda gradient: gradient * 3))
        loss.backward()
    for handle in handles:
        handle.remove()
    return [*seen, *(p.grad.clone() for p in model.parameters())]


@EVERY_MODE
@as_resident(lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)))
def test_a_parameter_that_a_second_derivative_lacks_has_no_gradient(
    model: nn.Module, attached
) -> list[torch.Tensor | None]:
    """Zeros would be a gradient for the optimizer, which decays the weight and counts the step."""
    with attached.step():
        inputs = stack_inputs(0, 0).requires_grad_()
        weighted = (model(inputs) * stack_inputs(1, 0)).sum()
        (slope,) = torch.autograd.grad(weighted, inputs, create_graph=True)
        slope.square().sum().backward()
    return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]


@EVERY_MODE
@as_resident()
def test_a_graph_that_is_kept_is_differentiated_twice(model: nn.Module, attached) -> list[torch.Tensor]:
    with attached.step():
        inputs = stack_inputs(0, 0).requires_grad_()
        loss = model(inputs).square().mean()
        loss.backward(retain_graph=True)
        once = inputs.grad.clone()
        loss.backward(retain_graph=True)
        (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
        slope.square().sum().backward()
    return [once, inputs.grad, slope.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@EVERY_MODE
@as_resident()
def test_two_forwards_and_an_evaluation_before_one_backward(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    for step in range(2):
        with attached.step():
            first = model(stack_inputs(step, 0))
            seen.append(evaluate(model))
            (first.square().mean() + model(stack_inputs(step, 2)).exp().mean()).backward()
        seen += [p.grad.clone() for p in model.parameters()]
    return seen
