"""Hooks see the gradients of each microbatch, and each is added to the gradients that are there."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import register_multi_grad_hook

from offload.microbatches.layer_major import one_after_another
from offload.modes.shard_offload import ShardOffload
from tests.offload.helpers.models import Block, Stack, stack_inputs, under
from tests.offload.helpers.user_code import EVERY_MODE, NoMode, as_resident, descend

MICROBATCHES = 3


class Resident(NoMode):
    accumulate = staticmethod(one_after_another)


def accumulate(model: nn.Module, attached, step: int = 0) -> list[torch.Tensor]:
    def loss(index: int) -> torch.Tensor:
        return model(stack_inputs(step, index)).square().mean()

    attached = Resident if attached is NoMode else attached
    return attached.accumulate([partial(loss, index) for index in range(MICROBATCHES)])


@EVERY_MODE
@as_resident()
def test_hooks_see_the_gradient_of_each_microbatch(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    weight = model.blocks[1].up.weight
    # What is not linear differs for a sum: a clipped gradient.
    hooks = [
        weight.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3)),
        weight.register_hook(lambda gradient: seen.append(gradient.clone())),
        model.head.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
    ]
    for step in range(2):
        with attached.step():
            seen += accumulate(model, attached, step)
        descend(model)
    assert len(seen) == 2 * 3 * MICROBATCHES
    for hook in hooks:
        hook.remove()
    with attached.step():
        seen += accumulate(model, attached)
    return [*seen, *(parameter.grad.clone() for parameter in model.parameters())]


@EVERY_MODE
@pytest.mark.parametrize("mode_of_hook", ["all", "any"])
@as_resident()
def test_hooks_on_several_gradients_run_once_each(model: nn.Module, attached, mode_of_hook: str) -> list[torch.Tensor]:
    seen = []

    def note(gradients: object) -> None:
        gradients = gradients if isinstance(gradients, (list, tuple)) else [gradients]
        seen.extend(gradient.clone() for gradient in gradients)

    weights = [model.head.weight, model.blocks[2].down.weight]
    register_multi_grad_hook(weights, note, mode=mode_of_hook)
    with attached.step():
        accumulate(model, attached)
    assert len(seen) == MICROBATCHES * (2 if mode_of_hook == "all" else 1)
    return seen


@EVERY_MODE
@as_resident()
def test_each_microbatch_is_added_to_the_gradients_that_are_there(model: nn.Module, attached) -> list[torch.Tensor]:
    # 1e8 swallows what is added to it one by one, and not the sum.
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e6)
    with attached.step():
        losses = accumulate(model, attached)
    first = [parameter.grad.clone() for parameter in model.parameters()]
    with attached.step():
        accumulate(model, attached, 1)
    return [*losses, *first, *(parameter.grad.clone() for parameter in model.parameters())]


class Corrected(Block):
    """A layer whose weight is the sum of two parameters: backward makes one gradient for both."""

    def __init__(self, width: int):
        super().__init__(width)
        self.correction = nn.Parameter(torch.zeros(2 * width, width))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(F.linear(self.norm(hidden), self.up.weight + self.correction, self.up.bias))


def corrected() -> Stack:
    model = Stack()
    model.blocks = nn.ModuleList(Corrected(16) for _ in range(4))
    return model


@EVERY_MODE
@as_resident(corrected)
def test_a_gradient_that_two_parameters_have_is_added_to_each(model: nn.Module, attached) -> list[torch.Tensor]:
    for step in range(2):
        with attached.step():
            accumulate(model, attached, step)
    return [parameter.grad.clone() for parameter in model.parameters()]


def hook(model: nn.Module) -> None:
    model.stem.bias.register_hook(lambda gradient: None)


def hook_on_what_is_frozen(model: nn.Module) -> None:
    hook(model)
    model.stem.bias.requires_grad_(False)


def gradient_that_is_there(model: nn.Module) -> None:
    model.stem.bias.grad = torch.zeros_like(model.stem.bias)


@pytest.mark.parametrize(
    ("prepare", "is_slow"), [(hook, True), (gradient_that_is_there, True), (hook_on_what_is_frozen, False)]
)
def test_the_price_is_that_each_microbatch_has_the_shards_copied_in(prepare: Callable, is_slow: bool):
    def weight_bytes(prepare: Callable) -> float:
        model, mode = Stack(), ShardOffload(shards=4, slots=1)
        with under(mode, model) as attached:
            prepare(model)
            with attached.step():
                accumulate(model, attached)
            moved = attached.counters()
        return moved.h2d_bytes - moved.activation_h2d_bytes

    alone = weight_bytes(lambda model: None)
    assert (weight_bytes(prepare) > 1.5 * alone) == is_slow
