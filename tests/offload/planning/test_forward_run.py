"""Forwards in a row keep the bus busy, or the device: they take as long as their copies, or as their arithmetic."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch

from offload.memory.bandwidth import Bandwidth
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Mode
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.planning.forward_run import ForwardRun, dry_run_forwards
from offload.planning.simulated_streams import SimulatedStreams
from tests.offload.helpers.models import Stack

WIDTH, DEPTH, COUNT = 256, 10, 8
GB_PER_S = 50.0
# Arithmetic of 4096 tokens takes two thirds of the time that the weights' copies take, or twice as long.
FAST, SLOW = 4096 * GB_PER_S * 1e9 / 2 * 1.5, 4096 * GB_PER_S * 1e9 / 4
CASES = {"64 tokens": (64, FAST), "4096 tokens, the bus bounds": (4096, FAST), "compute bounds": (4096, SLOW)}
MODES: dict[str, Callable[[], Mode]] = {
    "bounce_linear": BounceLinear,
    "bounce_linear, half stays": lambda: BounceLinear(resident="50%"),
    "layer_stream": LayerStream,
    # Stem and head are tiny units with a slot each: with one slot less the first block would wait for the last.
    "layer_stream, all streams": lambda: LayerStream(outside="stream", slots=4),
    "layer_stream, two slots": lambda: LayerStream(slots=2),
    "shard_offload": lambda: ShardOffload(shards=5),
    "tensor_swap over layer_stream": lambda: TensorSwap(LayerStream()),
}


@dataclass(frozen=True)
class Times:
    """In ms: forwards in a row, what their copies and their arithmetic take alone, and the copy of the largest unit."""

    all: float
    bus: float
    compute: float
    fill: float


def times(mode: Mode, tokens: Sequence[int], flops_per_s: float, around: Callable | None = None) -> Times:
    """Runs a forward for each number of tokens."""
    with torch.device("meta"):
        model = Stack(width=WIDTH, depth=DEPTH)
    timed = SimulatedStreams(torch.device("meta"), Bandwidth(GB_PER_S, GB_PER_S, GB_PER_S), flops_per_s)
    footprint = mode.footprint(model)
    calls = [lambda count=count: model(torch.empty(count, 8, device="meta")) for count in tokens]
    found = dry_run_forwards(mode, model, calls, timed=timed, around=around)
    assert found.d2h_bytes == 0
    # What came in for a forward that is never made takes no time of those that are.
    used_bytes = min(found.h2d_bytes, len(tokens) * footprint.host_weight_bytes)
    ms = 1 / GB_PER_S / 1e6
    return Times(found.ms, used_bytes * ms, found.flops / flops_per_s * 1e3, footprint.largest_unit_bytes * ms)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", MODES)
@pytest.mark.slow
def test_forwards_in_a_row_take_as_long_as_their_copies_or_their_arithmetic(name: str, case: str):
    found = times(MODES[name](), [CASES[case][0]] * COUNT, CASES[case][1])
    assert found.bus > 0
    # Nothing computes before the first unit is there. The first forward teaches the order, so the second may begin so.
    assert found.all <= 1.01 * max(found.bus, found.compute) + 2 * found.fill


@pytest.mark.parametrize("name", ["bounce_linear", "layer_stream", "shard_offload"])
@pytest.mark.slow
def test_so_they_do_in_the_first_step(name: str):
    found = times(mode := MODES[name](), [4096] * COUNT, FAST, mode.step)
    assert found.all <= 1.01 * found.bus + 2 * found.fill


@pytest.mark.parametrize("name", ["bounce_linear", "layer_stream"])
def test_lone_forwards_fill_the_slots_anew_each_time(name: str):
    found = times(MODES[name](), [4096] * COUNT, FAST, nullcontext)
    assert found.all <= 1.01 * found.bus + (COUNT + 1) * found.fill
    assert found.all > 1.01 * found.bus + 2 * found.fill


def test_other_shapes_between_change_no_order():
    found = times(LayerStream(), [4096, 1, 64, 4096, 1, 1, 4096, 64], FAST)
    assert found.all <= 1.01 * found.bus + 2 * found.fill


def test_copies_grow_by_a_forward_each_time_and_units_that_fit_stay():
    bytes_of = {}
    for slots in (3, DEPTH):
        for count in (2, 3, 4):
            with torch.device("meta"):
                model = Stack(width=WIDTH, depth=DEPTH)
            timed = SimulatedStreams(torch.device("meta"), Bandwidth(GB_PER_S, GB_PER_S, GB_PER_S), FAST)
            mode = LayerStream(slots=slots)
            unit_bytes = mode.footprint(model).host_weight_bytes
            call = functools.partial(model, torch.empty(1, 8, device="meta"))
            bytes_of[slots, count] = dry_run_forwards(mode, model, [call] * count, timed=timed).h2d_bytes
    assert bytes_of[3, 4] - bytes_of[3, 3] == bytes_of[3, 3] - bytes_of[3, 2] == unit_bytes
    assert {bytes_of[DEPTH, count] for count in (2, 3, 4)} == {unit_bytes}


def test_a_resident_model_copies_nothing_and_is_left_as_it_was_found():
    with torch.device("meta"):
        model = Stack()
    before = list(model.parameters())
    timed = SimulatedStreams(torch.device("meta"), Bandwidth(GB_PER_S, GB_PER_S, GB_PER_S), FAST)
    found = dry_run_forwards(Resident(), model, [lambda: model(torch.empty(7, 8, device="meta"))], timed=timed)
    # Eight products: stem, two of each of four blocks, head.
    flops = 2 * 7 * sum(parameter.numel() for parameter in before if parameter.ndim == 2)
    assert found == ForwardRun(flops, 0, 0, pytest.approx(flops / FAST * 1e3), found.peak_bytes)
    assert all(one is other for one, other in zip(model.parameters(), before, strict=True))


def test_the_peak_has_what_outlives_a_forward_and_no_slots():
    kept = []

    def peak_bytes(mode: Mode, count: int) -> int:
        with torch.device("meta"):
            model = Stack(width=WIDTH)
        call = functools.partial(model, torch.empty(64, 8, device="meta"))
        kept.clear()
        timed = SimulatedStreams(torch.device("meta"), Bandwidth(GB_PER_S, GB_PER_S, GB_PER_S), FAST)
        keeps = [lambda: kept.append(call())] * count
        return dry_run_forwards(mode, model, keeps, timed=timed).peak_bytes

    with torch.device("meta"):
        result_bytes = Stack(width=WIDTH)(torch.empty(64, 8, device="meta")).nbytes
    for make in (Resident, LayerStream):
        assert peak_bytes(make(), 3) - peak_bytes(make(), 2) == result_bytes
    assert peak_bytes(LayerStream(), 1) == peak_bytes(Resident(), 1) >= 2 * 64 * WIDTH * 4
