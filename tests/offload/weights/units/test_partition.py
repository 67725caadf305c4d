"""Models cut into units and windows, and the units that stay on the device."""

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.weights.units import partition
from offload.weights.units.partition import CutPoint, check_amount, cut, keep_on_device, keep_resident, open_at_once
from tests.offload.helpers.models import Stack, same_as_resident, under


def test_a_unit_has_the_parameters_below_its_cut_point():
    model = Stack()
    parts = cut(model, [CutPoint("blocks.0", model.blocks[0]), CutPoint("head", model.head)])
    assert [unit.name for unit in parts.units] == ["blocks.0", "head"]
    assert [tensor.name for tensor in parts.units[0].tensors][:2] == ["blocks.0.norm.weight", "blocks.0.norm.bias"]
    assert parts.unit_bytes + parts.resident_bytes >= sum(p.nbytes for p in model.parameters())
    windows = [window.module for window in parts.windows]
    assert windows[0] is model.blocks[0]
    assert model.blocks[0].up in windows


def test_a_module_that_two_cut_points_have_in_common_stays_resident():
    common = nn.Linear(2, 2)
    model = nn.Sequential(nn.Sequential(nn.Linear(2, 2), common), nn.Sequential(nn.Linear(2, 2), common))
    for points in (
        [CutPoint("0", model[0]), CutPoint("1", model[1])],
        [CutPoint("0", model[0]), CutPoint("common", common, deep=False)],
    ):
        parts = cut(model, points)
        assert {tensor for tensor, _ in parts.resident} >= {common.weight, common.bias}
        assert not any(tensor.host is common.weight for unit in parts.units for tensor in unit.tensors)


def test_weights_shared_between_cut_points_have_one_home_and_two_windows():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    parts = cut(model, [CutPoint("0", first), CutPoint("1", second)])
    assert [[tensor.name for tensor in unit.tensors] for unit in parts.units] == [["0.weight", "0.bias"], ["1.bias"]]
    assert [len(window.units) for window in parts.windows] == [1, 2]


def test_weights_shared_with_the_rest_of_the_model_stay_resident():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    parts = cut(model, [CutPoint("head", model["head"])])
    assert not parts.units
    assert len(parts.resident) == 1


def test_what_trains_may_stay():
    model = Stack()
    model.requires_grad_(False)
    model.blocks[1].up.weight.requires_grad_(True)
    points = [CutPoint("blocks.0", model.blocks[0]), CutPoint("blocks.1", model.blocks[1])]
    all_stream, some_stay = cut(model, points), cut(model, points, trained_stays=True)
    assert all_stream.gradient_bytes > some_stay.gradient_bytes == 0
    assert some_stay.unit_bytes == all_stream.unit_bytes - model.blocks[1].up.weight.nbytes
    assert any(tensor is model.blocks[1].up.weight for tensor, _ in some_stay.resident)
    # Its bias streams, so its module has a window all the same.
    assert model.blocks[1].up in [window.module for window in some_stay.windows]


def test_overlapping_cut_points_are_refused():
    model = Stack()
    with pytest.raises(ValueError, match=r"blocks\.0\.up lies inside blocks\.0"):
        cut(model, [CutPoint("blocks.0", model.blocks[0]), CutPoint("blocks.0.up", model.blocks[0].up)])


def test_a_module_that_is_named_twice_makes_one_unit_and_one_without_tensors_none():
    model = nn.Sequential(nn.Linear(2, 2), nn.GELU())
    parts = cut(model, [CutPoint("first", model[0]), CutPoint("again", model[0]), CutPoint("gelu", model[1])])
    assert [unit.name for unit in parts.units] == ["first"]


def test_a_shallow_cut_point_takes_the_tensors_of_its_module_alone():
    model = Stack(depth=1)
    parts = cut(model, [CutPoint("model", model, deep=False), CutPoint("norm", model.blocks[0].norm, deep=False)])
    assert [unit.name for unit in parts.units] == ["norm"]
    assert len(parts.resident) == len(list(model.parameters())) - 2


def test_units_that_are_kept_leave_the_windows_and_the_others_are_numbered_anew():
    model = Stack()
    parts = cut(model, [CutPoint(f"blocks.{index}", block) for index, block in enumerate(model.blocks)])
    kept = keep_on_device(parts, 2)
    assert [(unit.index, unit.name) for unit in kept.units] == [(0, "blocks.1"), (1, "blocks.3")]
    assert not any(window.module in (model.blocks[0], model.blocks[2]) for window in kept.windows)
    of_blocks = sum(p.nbytes for index in (0, 2) for p in model.blocks[index].parameters())
    assert kept.resident_bytes - parts.resident_bytes == of_blocks


def test_windows_open_at_once_are_those_of_modules_inside_each_other():
    block = nn.Module()
    block.scale, block.up, block.down = nn.Parameter(nn.Linear(1, 1).weight), nn.Linear(4, 8), nn.Linear(8, 4)
    points = [CutPoint("scale", block, deep=False), CutPoint("up", block.up), CutPoint("down", block.down)]
    parts = cut(block, points)
    assert sorted(unit.name for unit in open_at_once(block, parts.windows)) == ["scale", "up"]


@pytest.mark.parametrize(
    ("amount", "kept"),
    [("0", set()), (0, set()), (2, {0, 5}), (10, set(range(10))), ("0%", set()), ("100%", set(range(10)))],
)
def test_resident_by_count_and_share(amount: str | int, kept: set[int]):
    assert keep_resident([100] * 10, amount) == kept


@pytest.mark.parametrize(
    ("amount", "kept"),
    [(1, {0}), ("4%", {0}), (2, {0, 1}), *((amount, {0, 1, 4, 9, 14, 19, 24, 29}) for amount in (8, "25%"))],
)
def test_the_first_units_of_many_stay_together_and_the_rest_are_spread(amount: str | int, kept: set[int]):
    assert keep_resident([100] * 32, amount) == kept


def test_a_first_unit_that_is_too_large_streams():
    assert keep_resident([900, *[10] * 31], "100B") == {2, 5, 8, 11, 14, 18, 21, 24, 27, 30}


@pytest.mark.parametrize("amount", ["700B", "1KiB", "33%", "90%"])
def test_resident_bytes_are_spread_and_never_exceeded(amount: str):
    sizes = [100, 50, 150] * 8
    budget = {"700B": 700, "1KiB": 1024, "33%": 0.33 * sum(sizes), "90%": 0.9 * sum(sizes)}[amount]
    kept = keep_resident(sizes, amount)
    total = sum(sizes[index] for index in kept)
    assert budget - max(sizes) < total <= budget
    assert 0 in kept
    halves = [sum(sizes[index] for index in kept if (index < 12) == first) for first in (True, False)]
    assert abs(halves[0] - halves[1]) <= max(sizes)


@pytest.mark.parametrize("amount", ["lots", "101%", "-1GiB", "GiB", 11, "1.5"])
def test_resident_out_of_range_is_refused(amount: str | int):
    with pytest.raises(ValueError, match=r"resident="):
        keep_resident([1] * 10, amount)


def test_an_amount_is_checked_without_a_model():
    for amount in (0, "1000", "25%", "2GiB"):
        check_amount(amount)
    for amount in ("lots", "101%", "1.5", -1):
        with pytest.raises(ValueError, match=r"resident="):
            check_amount(amount)


# A layer of n x n float32 numbers has 4 n^2 bytes: 16 x 16 is no longer small.
SMALL = 1024


@pytest.fixture(autouse=True)
def small_units_join(small_things_move, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(partition, "SMALL_BYTES", SMALL)


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
