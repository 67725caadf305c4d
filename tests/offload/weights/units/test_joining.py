"""Small units join a neighbour, which changes how they travel and no number."""

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.weights.units import joining
from tests.offload.helpers.models import Stack, same_as_resident, under

# A layer of n x n float32 numbers has 4 n^2 bytes: 16 x 16 is no longer small.
SMALL = 1024


@pytest.fixture(autouse=True)
def small_units_join(small_things_move, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining, "SMALL_BYTES", SMALL)


def linear(width: int, rows: int | None = None) -> nn.Linear:
    return nn.Linear(width, rows or width, bias=False)


def units(model: nn.Module, **knobs: object) -> list[str]:
    """Returns the names of the units that bounce_linear makes."""
    return list(dict.fromkeys(point.name for point in BounceLinear(**knobs).chosen(model)))


class Adapted(nn.Module):
    """A layer with two adapters of low rank, as peft nests them."""

    def __init__(self, width: int = 32, rank: int = 2):
        super().__init__()
        self.base = linear(width)
        self.down = nn.ModuleDict({"default": linear(width, rank)})
        self.up = nn.ModuleDict({"default": linear(rank, width)})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.base(hidden) + self.up["default"](self.down["default"](hidden))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.second = nn.LayerNorm(32), Adapted(), linear(32)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.second(self.first(self.norm(hidden)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = linear(8, 32)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = linear(32, 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.stem(hidden)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


def test_a_layer_and_its_adapters_are_one_unit_at_the_module_around_them():
    blocks = [f"blocks.{number}.{name}" for number in range(3) for name in ("first", "second")]
    # Stem and head are small and have no neighbours: blocks are used as a whole.
    assert units(Model()) == ["stem", *blocks, "head"]
    mode, model = BounceLinear(), Model()
    with under(mode, model) as attached:
        (unit,) = (unit for unit in attached._streamer.cut.units if unit.name == "blocks.1.first")
        assert [tensor.name.removeprefix("blocks.1.first.") for tensor in unit.tensors] == [
            "base.weight",
            "down.default.weight",
            "up.default.weight",
        ]


def test_small_units_join_one_another_until_they_are_large():
    assert units(nn.Sequential(*(linear(8) for _ in range(10)))) == ["0 to 3", "4 to 9"]
    assert units(nn.Sequential(*(linear(8) for _ in range(3)))) == ["Sequential"]


def test_what_is_small_still_joins_the_unit_before_or_else_the_one_after():
    assert units(nn.Sequential(linear(32), linear(8), linear(32))) == ["0 to 1", "2"]
    assert units(nn.Sequential(linear(8), linear(32), linear(32))) == ["0 to 1", "2"]
    assert units(nn.Sequential(linear(32), linear(16), linear(32))) == ["0", "1", "2"]


def test_experts_travel_alone():
    model = nn.ModuleDict({"gate": linear(8), "experts": nn.ModuleList(nn.Sequential(linear(8)) for _ in range(3))})
    assert units(model) == ["gate", "experts.0.0", "experts.1.0", "experts.2.0"]


def test_a_layer_in_two_places_and_a_tied_weight_are_joined_once():
    layer, tied = linear(8), linear(8)
    tied.weight = layer.weight
    model = nn.Sequential(layer, nn.Sequential(layer, linear(8)), tied)
    assert units(model) == ["Sequential"]
    same_as_resident(nn.Sequential(linear(8), model), BounceLinear(slots=2))


def test_a_small_norm_before_the_head_travels_with_it_under_layer_stream():
    model = Model()
    model.blocks = nn.ModuleList([nn.Sequential(linear(32), linear(8, 32))])
    model.head, model.last = nn.LayerNorm(32), linear(32)
    points = LayerStream(outside="stream").chosen(model)
    assert list(dict.fromkeys(point.name for point in points)) == ["blocks.0", "stem", "head to last"]
    assert [point.name for point in LayerStream().chosen(model)] == ["blocks.0"]
    same_as_resident(Stack(), LayerStream(outside="stream", slots=2))


def test_what_include_and_exclude_leave_out_joins_nothing():
    assert units(Model(), include=["blocks.0.*"], exclude=["*.down.*"]) == [
        "blocks.0.first.base to blocks.0.first.up.default",
        "blocks.0.second",
    ]


def test_parameters_outside_layers_travel_with_the_unit_that_their_layer_joins():
    model = Model()
    assert units(model, outside="stream")[1:3] == [
        "blocks.0.first.base to blocks.0.first.up.default",
        "blocks.0.second",
    ]
    assert BounceLinear(outside="stream").footprint(model).resident_bytes == 0
    same_as_resident(model, BounceLinear(outside="stream", slots=2))


@pytest.mark.parametrize("slots", [1, 2, 4])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
def test_joined_units_compute_the_same_numbers(slots: int, recompute: str | None):
    model = Stack(recompute=recompute, dropout=0.3)
    assert units(model) == [
        "stem",
        *(f"blocks.{number}.{name}" for number in range(4) for name in ("up", "down")),
        "head",
    ]
    same_as_resident(model, BounceLinear(slots=slots))
    model = nn.Sequential(linear(8, 32), *(Block() for _ in range(2)), linear(32, 4))
    same_as_resident(model, BounceLinear(slots=slots))
