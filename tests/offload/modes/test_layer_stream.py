"""layer_stream computes the resident model's numbers on models of many shapes, with their buffers."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import Block, Stack, normal, same_as_resident, stack_inputs, under, with_copy


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("outside", ["resident", "stream"])
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_equals_resident(slots: int, outside: str, recompute: str | None):
    same_as_resident(Stack(recompute=recompute, dropout=0.3), LayerStream(slots=slots, outside=outside))


class ResidualConvolutions(nn.Module):
    """A small ResNet: batch norm statistics and a counter live in the blocks; blocks differ in shape."""

    class Unit(nn.Module):
        def __init__(self, inside: int, outside: int):
            super().__init__()
            self.conv = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(outside)
            self.shortcut = nn.Conv2d(inside, outside, 1) if inside != outside else nn.Identity()
            self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

        def forward(self, images):
            self.calls += 1
            return F.relu(self.norm(self.conv(images)) + self.shortcut(images))

    def __init__(self, recompute: bool = False):
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3)
        self.blocks = nn.ModuleList([self.Unit(4, 4), self.Unit(4, 6), self.Unit(6, 6), self.Unit(6, 8)])
        self.head = nn.Linear(8, 3)
        self.recompute = recompute

    def forward(self, images):
        hidden = self.stem(images)
        for block in self.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False) if self.recompute else block(hidden)
        return self.head(hidden.mean((2, 3)))


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("slots", [1, 2])
def test_buffers_stream_and_their_updates_come_home(slots: int, recompute: bool):
    same_as_resident(ResidualConvolutions(recompute), LayerStream(slots=slots), normal(2, 3, 6, 6))


def test_evaluation_uses_running_statistics():
    model, mode = ResidualConvolutions(), LayerStream(slots=1)
    images = normal(2, 3, 6, 6)(0, 0)
    with torch.no_grad():
        model(images)
    model.eval()
    expected = model(images)
    with under(mode, model) as attached, torch.no_grad():
        before = attached.counters().d2h_bytes
        assert torch.equal(model(images), expected)
        # The counters move in evaluation too, the statistics do not.
        assert attached.counters().d2h_bytes - before == 4 * 8


class BareParameters(nn.Module):
    """Blocks that compute with parameters of their own, and a parameter outside the blocks."""

    class Scale(nn.Module):
        def __init__(self, width: int):
            super().__init__()
            self.scale = nn.Parameter(torch.full((width,), 1.1))
            self.layer = nn.Linear(width, width)

        def forward(self, hidden):
            return torch.tanh(self.layer(hidden * self.scale)) * self.scale.exp()

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Scale(8) for _ in range(3))
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden + self.shift)
        return hidden


class TwoTowers(nn.Module):
    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(Block(8) for _ in range(4))
        self.right = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, hidden):
        left = right = hidden
        for block in self.left:
            left = block(left)
        for block in self.right:
            right = block(right)
        return left * right


def test_a_block_listed_twice_and_weights_tied_across_blocks():
    model = Stack()
    model.blocks[1].up.weight = model.blocks[3].up.weight
    model.blocks.append(model.blocks[0])
    same_as_resident(model, LayerStream(slots=2))
    assert LayerStream().footprint(model).units == 4


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.LSTM(8, 8, batch_first=True) for _ in range(3))

    def forward(self, hidden):
        for layer in self.layers:
            hidden = layer(hidden)[0]
        return hidden


def test_recurrent_layers_compute_with_the_slot():
    model, mode = Recurrent(), LayerStream(slots=1)
    with under(mode, model), torch.no_grad():
        expected = model(normal(2, 4, 8)(0, 0))
        layer = model.layers[0]
        inside = {}
        layer.register_forward_hook(lambda *_: inside.update(after=layer._flat_weights[0]))
        assert torch.equal(model(normal(2, 4, 8)(0, 0)), expected)
        assert inside["after"] is layer.weight_ih_l0


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=False)


@pytest.mark.parametrize(
    ("make", "inputs", "knobs"),
    [
        (BareParameters, stack_inputs, {"slots": 1}),
        *((TwoTowers, stack_inputs, {"slots": 2, "layers": layers}) for layers in ("left", "right", None)),
        (Recurrent, normal(2, 4, 8), {"slots": 1}),
        (encoder, normal(2, 5, 8), {"slots": 1}),
    ],
)
def test_blocks_of_many_kinds(make: Callable, inputs: Callable, knobs: dict):
    same_as_resident(make(), LayerStream(**knobs), inputs)


def test_transformer_encoder_fast_path_in_evaluation():
    model = encoder().eval()
    inputs = normal(2, 5, 8)(0, 0)
    with torch.no_grad():
        expected = model(inputs)
        with under(LayerStream(slots=1), model):
            assert torch.equal(model(inputs), expected)


def test_generation_under_inference_mode_and_training_take_turns():
    streamed, resident = with_copy(Stack())
    mode = LayerStream(slots=2)
    with under(mode, streamed) as attached:
        for step in range(3):
            with torch.inference_mode():
                assert torch.equal(streamed(stack_inputs(step, 0)), resident(stack_inputs(step, 0)))
            with attached.step():
                streamed(stack_inputs(step, 1)).square().mean().backward()
            resident(stack_inputs(step, 1)).square().mean().backward()
            for model in (streamed, resident):
                torch.optim.SGD(model.parameters(), lr=0.1).step()
                model.zero_grad()


def test_slots_bound_what_is_on_the_device():
    mode = LayerStream(slots=2)
    model = Stack(depth=8, recompute="non-reentrant")
    plan = mode.footprint(model)
    assert plan.slot_bytes == 2 * plan.largest_unit_bytes
    with under(mode, model) as attached, attached.step():
        model(stack_inputs(0, 0)).sum().backward()
        assert attached._streamer._slots.nbytes == plan.slot_bytes


def test_forward_moves_each_block_once_and_the_turn_saves_the_last():
    mode, model = LayerStream(slots=2), Stack(depth=6)
    unit = mode.footprint(model).largest_unit_bytes
    with under(mode, model) as attached:
        for _ in range(2):
            before = attached.counters().h2d_bytes
            with attached.step():
                loss = model(stack_inputs(0, 0)).sum()
                assert attached.counters().h2d_bytes - before == 6 * unit
                loss.backward()
            assert attached.counters().h2d_bytes - before == (6 + 6 - 2) * unit
            model.zero_grad()


def test_copies_are_named_in_a_profile():
    model, mode = Stack(), LayerStream(slots=2)
    with under(mode, model) as attached:
        for _ in range(2):
            with torch.profiler.profile() as profile, attached.step():
                model(stack_inputs(0, 0)).sum().backward()
    names = {event.name for event in profile.events()}
    assert "copy in blocks.0" in names
    # Those that leave together have the name of the first.
    for copied in ("copy out gradient of blocks.3.", "copy in earlier gradient of blocks.3."):
        assert any(name.startswith(copied) for name in names)
