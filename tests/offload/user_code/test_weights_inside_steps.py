"""Users change weights and gradients inside a step: closures, perturbed weights, networks that take turns."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import EVERY_MODE, as_resident, descend, evaluate, same_as_resident, train_step

pytestmark = pytest.mark.usefixtures("device")


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
