"""Models that are pruned, parametrized, converted or otherwise rebuilt before and while a mode is attached."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from tests.offload.helpers.models import Stack, stack_inputs
from tests.offload.helpers.user_code import (
    EVERY_MODE,
    EVERY_MODE_OR_NONE,
    MODES,
    RESIDENT_MODES,
    NoMode,
    as_resident,
    evaluate,
    same_as_resident,
    train_step,
    under,
)

pytestmark = pytest.mark.usefixtures("device")


def pruned() -> nn.Module:
    model = Stack()
    for layer in (model.stem, model.blocks[1].up, model.blocks[2].down):
        prune.l1_unstructured(layer, "weight", 0.5)
    return model


def normalised_by_hooks() -> nn.Module:
    model = Stack()
    with pytest.deprecated_call():
        nn.utils.weight_norm(model.blocks[0].up)
    nn.utils.spectral_norm(model.blocks[1].up)
    return model


def scenario(model: nn.Module, mode) -> list[torch.Tensor]:
    seen = []
    for step in range(3):
        seen += [train_step(model, mode, step), evaluate(model)]
    return seen


@EVERY_MODE_OR_NONE
@pytest.mark.parametrize("build", [pruned, normalised_by_hooks])
def test_weights_computed_by_hooks(make: Callable, build: Callable[[], nn.Module]):
    if build is normalised_by_hooks and make().recomputes:
        pytest.skip("the hook changes its buffers in the recompute, too")
    same_as_resident(make, scenario, build)


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(hidden)) * self.scale


@EVERY_MODE_OR_NONE
@as_resident(lambda: nn.Sequential(*(Scaled() for _ in range(4))))
def test_buffers_changed_inside_a_step(model: nn.Module, attached) -> list[torch.Tensor]:
    seen = []
    for step in range(2):
        with attached.step():
            for microbatch in range(2):
                for block in model:
                    block.scale.mul_(0.5)
                loss = model(stack_inputs(step, microbatch)).square().mean()
                loss.backward()
                seen.append(loss.detach())
        seen += [p.grad.clone() for p in model.parameters()]
        model.zero_grad()
    return seen


CHANGES = {
    "pruned": lambda model: prune.l1_unstructured(model.blocks[1].up, "weight", 0.5),
    "parametrized": lambda model: parametrizations.weight_norm(model.blocks[1].up),
    "deleted": lambda model: delattr(model.blocks[1].up, "weight"),
}


@EVERY_MODE
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_parameter_that_is_gone_is_named_and_detach_works(make: Callable, change: Callable):
    model, mode = Stack(), make()
    with under(mode, model) as attached:
        train_step(model, attached)
        change(model)
        message = (
            r"^blocks\.1\.up\.weight is no longer a parameter of its module: it was pruned, parametrized or deleted"
        )
        for compute in (lambda: evaluate(model), lambda: train_step(model, attached)):
            with pytest.raises(RuntimeError, match=message) as refused:
                compute()
            assert "\n" not in str(refused.value)
    if change is CHANGES["deleted"]:
        return
    # Detached and attached again, it streams as it is now.
    mode = make()
    with under(mode, model) as attached:
        train_step(model, attached)


@EVERY_MODE_OR_NONE
def test_pruning_ended_while_attached(make: Callable):
    model, mode = pruned(), make()
    with under(mode, model) as attached:
        train_step(model, attached)
        for layer in (model.stem, model.blocks[1].up, model.blocks[2].down):
            prune.remove(layer, "weight")
    mode = make()
    with under(mode, model) as attached:
        train_step(model, attached)


CONVERSIONS = {
    "double": (lambda model: model.double(), lambda model: model.float()),
    "meta": (lambda model: model.to("meta"), None),
    "cuda": (lambda model: model.cuda(), lambda model: model.cpu()),
}


@EVERY_MODE
@pytest.mark.parametrize("conversion", CONVERSIONS)
@pytest.mark.parametrize("detached", [False, True])
def test_a_model_converted_while_attached(make: Callable, conversion: str, detached: bool, device: str):
    convert, undo = CONVERSIONS[conversion]
    if conversion == "cuda" and device != "cuda":
        pytest.skip("needs a CUDA device")

    def converted(model: nn.Module, mode) -> list[torch.Tensor]:
        seen = [train_step(model, mode)]
        if mode is NoMode:
            return [*seen, train_step(model, mode, 1), evaluate(model)]
        convert(model)
        with pytest.raises(
            RuntimeError, match=r"^\S+ is torch\.float.* now and was torch\.float32 .*; detach"
        ) as refused:
            train_step(model, mode, 1)
        assert "\n" not in str(refused.value)
        with pytest.raises(RuntimeError):
            evaluate(model)
        undo(model)
        if make is not MODES["bounce_linear"]:
            # These do not stream: they are where their user has put them.
            model.stem.to(device)
            model.head.to(device)
        return [*seen, train_step(model, mode, 1), evaluate(model)]

    if undo is not None and not detached:
        same_as_resident(make, converted)
        return
    model, mode = Stack(), make()
    with under(mode, model) as attached:
        convert(model)
        with pytest.raises(RuntimeError, match=r"was moved or replaced; detach the mode before model\.to"):
            train_step(model, attached)
    if undo is not None:
        undo(model)
        mode = make()
        with under(mode, model) as attached:
            train_step(model, attached)


@pytest.mark.parametrize("make", RESIDENT_MODES.values(), ids=RESIDENT_MODES)
def test_detach_after_a_conversion_of_what_is_resident(make: Callable):
    model, mode = Stack(), make()
    with under(mode, model) as attached:
        train_step(model, attached)
        model.double()
    assert all(p.device.type == "cpu" and p.dtype is torch.float64 for p in model.parameters())
