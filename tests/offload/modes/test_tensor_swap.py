"""tensor_swap, alone and over modes that stream weights, computes the resident model's numbers."""

import pytest
import torch
from torch import nn

from offload.knobs import KnobError
from offload.modes import tensor_swap
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.models import (
    Shared,
    Stack,
    assert_same,
    same_as_resident,
    stack_inputs,
    tokens,
    train,
    under,
    with_copy,
)
from tests.offload.helpers.modes import WEIGHTS, recomputing


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few bytes that most saved tensors really leave the device of these small models."""
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 0)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
def test_equals_resident(weights: str, checkpointing: str | None):
    same_as_resident(Stack(recompute=checkpointing, dropout=0.3), TensorSwap(WEIGHTS[weights]()))


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if "recomputing" not in name])
def test_equals_resident_with_blocks_that_are_recomputed_after_attaching(weights: str):
    """As in the training loop: the block's forward is replaced, so only its input is saved outside of it."""

    swapped, resident = with_copy(Stack(dropout=0.3))
    mode = recomputing(TensorSwap(WEIGHTS[weights]()))
    with under(mode, swapped) as attached:
        with attached.step():
            swapped(stack_inputs(0, 0)).sum().backward()
        # The inputs of the blocks and of the head.
        assert attached.counters().swapped_bytes == 5 * (5 * 16 * 4)
        swapped.zero_grad()
    assert_same(train(swapped, recomputing(TensorSwap(WEIGHTS[weights]()))), train(resident, Resident()))


@pytest.mark.sampled
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(("budget", "prefetch_bytes"), [(3000, 2000), (0, 0)])
def test_a_budget_and_no_prefetch_change_no_number(
    weights: str, budget: int, prefetch_bytes: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tensor_swap, "PREFETCH_BYTES", prefetch_bytes)
    same_as_resident(Stack(dropout=0.2), TensorSwap(WEIGHTS[weights](), budget=budget))


def test_a_budget_is_bytes_or_auto():
    with pytest.raises(KnobError, match=r"budget=much: must be bytes, .* or auto"):
        TensorSwap(Resident(), budget="much")


def test_automatic_budget_changes_no_number():
    same_as_resident(Stack(), TensorSwap(Resident(), budget="auto"), steps=5)


def test_shared_layers_and_tied_weights():
    same_as_resident(Shared(), TensorSwap(BounceLinear(slots=2)), tokens)


def test_frozen_first_layers_and_layers_that_save_nothing():
    class Quiet(nn.Module):
        def forward(self, hidden):
            return hidden + 1

    model = Stack()
    model.blocks.insert(1, Quiet())
    for frozen in (model.stem, model.blocks[0]):
        frozen.requires_grad_(False)
    same_as_resident(model, TensorSwap(Resident()))


def test_two_models_side_by_side():
    first, second = Stack(), Stack(depth=2)
    mode = TensorSwap(Resident())
    with under(mode, first) as one, under(mode, second) as other, one.step(), other.step():
        first(second(stack_inputs(0, 0)).repeat(1, 2)).sum().backward()
        assert other.counters().swapped_bytes < one.counters().swapped_bytes


def test_autocast():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Stack()

        def forward(self, inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(inputs)

    same_as_resident(Cast(), TensorSwap(Resident()))
    same_as_resident(Cast(), TensorSwap(LayerStream(layers="body.blocks", slots=1)))
