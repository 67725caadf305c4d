"""Footprints: bytes before anything is allocated."""

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.planning.simulated_streams import PlannedSharers
from tests.offload.helpers.models import Shared, Stack


def test_a_footprint_needs_no_memory():
    with torch.device("meta"):
        model = Stack(width=1 << 16, depth=40)
    plan = LayerStream(slots=2).footprint(model)
    weights = sum(p.nbytes for p in model.blocks.parameters())
    assert weights == plan.host_weight_bytes == plan.host_gradient_bytes > 2**41
    assert plan.slot_bytes == 2 * plan.largest_unit_bytes == 2 * weights // 40
    assert (plan.h2d_bytes, plan.d2h_bytes) == (2 * weights, weights)
    assert LayerStream().footprint(model, recompute=True).h2d_bytes == 3 * weights
    assert all(p.is_meta for p in model.parameters())


def test_microbatches_share_the_traffic_of_a_step_if_the_mode_is_layer_major():
    model = Stack()
    one = LayerStream(slots=2).footprint(model)
    assert one.for_microbatches(1) == one
    three = one.for_microbatches(3)
    # The gradients of the second and third are added to those before, which come back for that.
    assert three.h2d_bytes == 3 * one.h2d_bytes + 2 * one.d2h_bytes > one.h2d_bytes
    assert three.d2h_bytes == 3 * one.d2h_bytes > 0
    shared = ShardOffload().footprint(model)
    assert shared.for_microbatches(3) == shared


def test_the_parts_of_a_model_add_up():
    model = Stack(width=64)
    total = sum(p.nbytes for p in model.parameters())
    assert Resident().footprint(model).resident_bytes == total
    for mode in (BounceLinear(), BounceLinear(outside="stream"), LayerStream(), LayerStream(outside="stream")):
        plan = mode.footprint(model)
        assert total <= plan.resident_bytes + plan.host_weight_bytes < total + 256 * 20


def test_slots_that_do_not_suffice_are_refused_before_the_first_step():
    """A weight of another unit is used together with that unit, a bare parameter with the layers of its module."""
    with pytest.raises(ValueError, match=r"slots=1: must be at least 2, because layer and again are used"):
        BounceLinear(slots=1).footprint(Shared())
    BounceLinear(slots=1, resident=1).footprint(Shared())

    block = nn.Module()
    block.scale, block.up, block.down = nn.Parameter(torch.ones(4)), nn.Linear(4, 8), nn.Linear(8, 4)
    BounceLinear(slots=1).footprint(block)
    with pytest.raises(ValueError, match=r"slots=1: must be at least 2, because up and down are used"):
        BounceLinear(slots=1, outside="stream").footprint(block)
    BounceLinear(slots=2, outside="stream").footprint(block)


def test_the_slices_of_processes_are_all_that_trains():
    model, mode = Stack(width=64), LayerStream(slots=2)
    assert mode.footprint(model).slices == ()
    plan = mode.footprint(model, options=AttachOptions(sharers=PlannedSharers(3)))
    assert len(plan.slices) == 3
    for number, unit in enumerate(plan.trained):
        assert sum(sum(units[number]) for units in plan.slices) == sum(tensor.numel() for tensor in unit)
        assert all(units[number] for units in plan.slices)
