"""What a stand-in knows of its slots, and which changes it counts."""

from __future__ import annotations

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.weights.windows.stand_in import StandIn, StandIns
from tests.offload.helpers.units import tensor_of, unit_of_two


def test_stand_ins_are_found_by_the_bytes_of_their_tensors():
    unit = unit_of_two()
    unit.tensors[1].offset = unit.tensors[0].nbytes
    found = StandIns([unit])
    assert [each.tensor for each in found[unit]] == unit.tensors
    assert found.at(unit, 0) is found.at(unit, 3) is found[unit][0]
    assert found.at(unit, 4) is found.at(unit, 7) is found[unit][1]


def test_views_of_a_slot_are_the_same_objects_and_are_told_from_others(streams: Streams):
    stand_in = StandIn(tensor_of(nn.Parameter(torch.ones(2, 4))))
    first, second = DeviceSlots(2, 64, streams)
    (view,) = stand_in.views_in(first)
    assert (view.shape, view.dtype, view.data_ptr()) == ((2, 4), torch.float32, first.bytes.data_ptr())
    assert stand_in.views_in(first)[0] is view
    assert stand_in.are_views_in(first, [view.detach()])
    for other in (*stand_in.views_in(second), view.view(4, 2), view.view(torch.int32), view.t().t()[:1], view.neg()):
        assert not stand_in.are_views_in(first, [other])


def test_changes_at_home_and_on_the_device_show_in_the_state():
    host = nn.Parameter(torch.ones(3))
    stand_in = StandIn(tensor_of(host))
    version, place = stand_in.state
    stand_in.device = torch.zeros(3)
    stand_in.note_installed()
    assert stand_in.state == (version, place)
    assert not stand_in.count_writes()
    stand_in.device.add_(1).mul_(2)
    assert stand_in.state == (version + 2, place)
    assert stand_in.count_writes()
    assert stand_in.writes == 2
    assert stand_in.state == (version + 2, place)
    with torch.no_grad():
        host.add_(1)
    assert stand_in.state == (version + 3, place)
    host.data = torch.zeros(3)
    assert stand_in.state[1] != place
