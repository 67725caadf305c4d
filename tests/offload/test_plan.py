"""Plans: bytes before anything is allocated, and the floor they imply."""

from __future__ import annotations

import torch
from support import Stack

from offload import registry
from offload.bandwidth import Bandwidth, measure_bandwidth
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident


def test_a_plan_needs_no_memory():
    with torch.device("meta"):
        model = Stack(width=1 << 16, depth=40)
    plan = LayerStream(slots=2).plan(model)
    weights = sum(p.nbytes for p in model.blocks.parameters())
    assert weights == plan.host_weight_bytes == plan.host_gradient_bytes > 2**41
    assert plan.slot_bytes == 2 * plan.largest_unit_bytes == 2 * weights // 40
    assert (plan.h2d_bytes, plan.d2h_bytes) == (2 * weights, weights)
    assert LayerStream().plan(model, recompute=True).h2d_bytes == 3 * weights
    assert all(p.is_meta for p in model.parameters())


def test_the_parts_of_a_model_add_up():
    model = Stack(width=64)
    total = sum(p.nbytes for p in model.parameters())
    assert Resident().plan(model).resident_bytes == total
    for mode in (BounceLinear(), BounceLinear(others="stream"), LayerStream(), LayerStream(embedding="stream")):
        plan = mode.plan(model)
        assert total <= plan.resident_bytes + plan.host_weight_bytes < total + 256 * 20


def test_the_floor_names_what_binds():
    plan = LayerStream().plan(Stack(width=64))
    megabytes = plan.h2d_bytes / 1e6
    assert plan.floor_ms(Bandwidth(1.0, 1.0, 1.0)) == (megabytes, "copies in")
    assert plan.floor_ms(Bandwidth(4.0, 1.0, 1.0)) == (megabytes / 2, "copies out")
    assert plan.floor_ms(Bandwidth(1.0, 1.0, 1.0), compute_ms=1e6) == (1e6, "compute")


def test_bandwidth_is_measured_each_way_and_both():
    streams = registry.acquire("cpu")
    speed = measure_bandwidth(streams, nbytes=2**20, repeats=3)
    assert min(speed.h2d, speed.d2h, speed.both) > 0.01
    registry.release(streams)
