"""Gradients that users keep, assign, ask autograd for, or hook."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, same_as_resident

pytestmark = pytest.mark.usefixtures("device")


def backward(model: nn.Module, mode, step: int) -> None:
    with mode.step():
        model(stack_inputs(step, 0)).square().mean().backward()


@EVERY_MODE
@pytest.mark.parametrize("view", [False, True])
def test_a_gradient_that_is_still_held_is_not_overwritten(make: Callable, view: bool):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        backward(model, mode, 0)
        held = [p.grad[:1] if view else p.grad for p in model.parameters()]
        model.zero_grad()
        backward(model, mode, 1)
        return [*held, *(p.grad.clone() for p in model.parameters())]

    same_as_resident(make, scenario)


@EVERY_MODE
def test_an_assigned_gradient_is_added_to_in_place(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        assigned = [torch.ones_like(p) for p in model.parameters()]
        for parameter, gradient in zip(model.parameters(), assigned, strict=True):
            parameter.grad = gradient
        backward(model, mode, 0)
        assert all(p.grad is gradient for p, gradient in zip(model.parameters(), assigned, strict=True))
        return assigned

    same_as_resident(make, scenario)


@EVERY_MODE
def test_gradients_asked_of_autograd(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        with mode.step():
            loss = model(stack_inputs(0, 0)).square().mean()
            found = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        assert all(p.grad is None for p in model.parameters())
        return list(found)

    same_as_resident(make, scenario)


@EVERY_MODE
def test_backward_for_some_inputs_alone(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        with mode.step():
            loss = model(stack_inputs(0, 0)).square().mean()
            loss.backward(inputs=list(model.blocks.parameters()))
        return [None if p.grad is None else p.grad.clone() for p in model.parameters()]

    same_as_resident(make, scenario)


@EVERY_MODE
def test_hooks_registered_before_and_after_forward(make: Callable):
    def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = []
        first, last = model.blocks[0].up.weight, model.blocks[3].down.weight
        handles = [first.register_hook(lambda gradient: gradient * 2)]
        handles.append(
            torch.autograd.graph.register_multi_grad_hook(
                [first, last], lambda gradients: seen.extend(g.clone() for g in gradients)
            )
        )
        with mode.step():
            loss = model(stack_inputs(0, 0)).square().mean()
            handles.append(last.register_hook(lambda gradient: gradient * 3))
            loss.backward()
        for handle in handles:
            handle.remove()
        return [*seen, *(p.grad.clone() for p in model.parameters())]

    same_as_resident(make, scenario)


@EVERY_MODE
def test_a_parameter_without_a_gradient_in_a_second_derivative_gets_none(make: Callable):
    """Zeros would be a gradient for the optimizer, which decays the weight and counts the step."""

    def scenario(model: nn.Module, mode) -> list[torch.Tensor | None]:
        with mode.step():
            inputs = stack_inputs(0, 0).requires_grad_()
            weighted = (model(inputs) * stack_inputs(1, 0)).sum()
            (slope,) = torch.autograd.grad(weighted, inputs, create_graph=True)
            slope.square().sum().backward()
        return [None if parameter.grad is None else parameter.grad.clone() for parameter in model.parameters()]

    same_as_resident(make, scenario, lambda: nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)))
