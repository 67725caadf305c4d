"""tensor_swap, alone and over modes that stream weights, computes the resident model's numbers."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from offload.activations.checkpointing import recompute
from offload.modes import tensor_swap
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from tests.offload.helpers.models import (
    Block,
    Shared,
    Stack,
    assert_same,
    attached,
    same_as_resident,
    stack_inputs,
    tokens,
    train,
    with_copy,
)
from tests.offload.helpers.modes import WEIGHTS
from tests.offload.helpers.swapping import swapping


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few bytes that most saved tensors really leave the device of these small models."""
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 0)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("layers", [None, ["*.up", "*.norm"], ["*"]], ids=["model", "parts", "all"])
@pytest.mark.sampled
def test_equals_resident(weights: str, checkpointing: str | None, layers: list | None):
    mode = swapping(WEIGHTS[weights](), layers=layers)
    same_as_resident(Stack(recompute=checkpointing, dropout=0.3), mode)


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if "recomputing" not in name])
@pytest.mark.parametrize("layers", [None, ["blocks.*"]])
def test_equals_resident_with_blocks_that_are_recomputed_after_attaching(weights: str, layers: list | None):
    """As in the training loop: the block's forward is replaced, so only its input is saved outside of it."""

    class Recomputed(TensorSwap):
        def attach(self, model, streams):
            super().attach(model, streams)
            self.undo = recompute(model.blocks)

        def detach(self):
            self.undo()
            super().detach()

    options = {"min_bytes": 1, "prefetch": 2000, "layers": layers}
    swapped, resident = with_copy(Stack(dropout=0.3))
    mode = Recomputed(WEIGHTS[weights](), **options)
    with attached(mode, swapped):
        with mode.step():
            swapped(stack_inputs(0, 0)).sum().backward()
        outside = 0 if layers else 5 * 16 * 4
        assert mode.counters().swapped_bytes == 4 * (5 * 16 * 4) + outside
        swapped.zero_grad()
    assert_same(
        train(swapped, Recomputed(WEIGHTS[weights](), **options)),
        train(resident, Resident()),
    )


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "knobs", [{"budget": 3000}, {"keep_last": 2}, {"host_budget": 20000}, {"prefetch": 0}], ids=str
)
@pytest.mark.sampled
def test_knobs_change_no_number(weights: str, knobs: dict):
    same_as_resident(Stack(dropout=0.2), swapping(WEIGHTS[weights](), **knobs))


def test_automatic_budget_changes_no_number():
    same_as_resident(Stack(), swapping(budget="auto"), steps=5)


def test_shared_layers_and_tied_weights():
    same_as_resident(Shared(), swapping(BounceLinear(slots=2)), tokens)


def test_frozen_first_layers_and_layers_that_save_nothing():
    class Quiet(nn.Module):
        def forward(self, hidden):
            return hidden + 1

    model = Stack()
    model.blocks.insert(1, Quiet())
    for frozen in (model.stem, model.blocks[0]):
        frozen.requires_grad_(False)
    for layers in (None, ["blocks.*"]):
        same_as_resident(copy.deepcopy(model), swapping(layers=layers))


class Towers(nn.Module):
    """Two lists of blocks of different depth, and a context that every block shares."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(Block(8) for _ in range(4))
        self.right = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, hidden):
        rope = torch.linspace(0, 1, 8).expand(5, 8)
        left = right = hidden
        for block in self.left:
            left = block(left * rope) + hidden
        for block in self.right:
            right = block(right * rope)
        return left * right


@pytest.mark.parametrize("layers", [None, ["left.*", "right.*"], ["left.*"]])
def test_two_towers_with_a_shared_context(layers: list | None):
    same_as_resident(Towers(), swapping(layers=layers))


def test_a_deeper_model_later_in_the_same_process():
    same_as_resident(Stack(depth=2), swapping(layers=["blocks.*"]))
    same_as_resident(Stack(depth=6), swapping(layers=["blocks.*"]))


def test_two_models_side_by_side():
    first, second = Stack(), Stack(depth=2)
    one, other = swapping(), swapping()
    with attached(one, first), attached(other, second), one.step(), other.step():
        first(second(stack_inputs(0, 0)).repeat(1, 2)).sum().backward()
        assert other.counters().swapped_bytes < one.counters().swapped_bytes


class Attention(nn.Module):
    """Queries, keys and values are chunks of one result, used transposed."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).unflatten(-1, (2, 12)).transpose(0, 1).chunk(3, dim=-1)
        scores = F.dropout(torch.softmax(query @ key.transpose(-2, -1), -1), 0.2)
        return (scores @ value).transpose(0, 1).flatten(1)


def test_views_chunks_and_transposes():
    same_as_resident(Attention(), swapping())


def test_convolutions_and_batch_norm():
    model = nn.Sequential(nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.MaxPool1d(2), nn.Flatten())

    def signal(step: int, microbatch: int) -> torch.Tensor:
        return stack_inputs(step, microbatch).repeat(3, 1).view(3, 5, 8)

    same_as_resident(model, swapping(), signal)


class Borrowing(nn.Module):
    """Blocks in which a module without parameters computes with those of the block."""

    class Unit(nn.Module):
        class Scale(nn.Module):
            def forward(self, hidden, scale):
                return torch.tanh(hidden * scale)

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 1.5))
            self.multiply = self.Scale()

        def forward(self, hidden):
            return self.multiply(hidden, self.scale)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Unit() for _ in range(4))
        for block in self.blocks:
            nn.init.normal_(block.scale)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_weights_in_slots_are_saved_by_name_also_where_swapping_begins_inside_their_window():
    same_as_resident(Borrowing(), swapping(LayerStream(slots=1), layers=["*.multiply"]))


def test_autocast():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Stack()

        def forward(self, inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(inputs)

    same_as_resident(Cast(), swapping())
    same_as_resident(Cast(), swapping(LayerStream(layers="body.blocks", slots=1)))
