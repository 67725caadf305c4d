"""The unit in each slot: its bytes, who has waited for its copy, and what is refused."""

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.memory.host_memory import HostArena
from offload.streams import registry
from offload.streams.stream_checker import StreamOrderError
from offload.streams.transfer import Telemetry, Transfer
from offload.weights.prefetching.slot_contents import Filler, SlotContents
from offload.weights.units.partition import CutModel, CutPoint, cut
from offload.weights.units.unit import OffloadUnit
from tests.offload.helpers.units import data_in

ARENA = HostArena(torch.device("cpu"))


@pytest.fixture
def parts() -> CutModel:
    model = nn.Sequential(*(nn.Linear(2, 2) for _ in range(3)))
    parts = cut(model, [CutPoint(str(index), layer) for index, layer in enumerate(model)])
    for unit in parts.units:
        unit.bring_home(ARENA)
    return parts


@pytest.fixture
def units(parts: CutModel) -> list[OffloadUnit]:
    return parts.units


@pytest.fixture
def contents(streams: registry.Streams, parts: CutModel) -> SlotContents:
    slots, transfer = DeviceSlots(2, parts.largest_unit_bytes, streams), Transfer(streams, Telemetry(streams))
    return SlotContents(slots, transfer, poison=True, filler=Filler(parts, transfer, ARENA, 0))


def test_a_unit_fills_a_slot_until_it_is_taken_out_and_leaves_no_value_there(contents, units):
    first, second, _ = units
    slot = contents.free_slot()
    contents.fill(first, slot)
    assert contents.slot_of == {first: slot}
    assert torch.equal(slot.bytes[: first.nbytes], first.weights.bytes)
    contents.fill(second, contents.free_slot())
    assert contents.free_slot() is None
    assert contents.evict(first) is contents.free_slot() is slot
    assert slot.content is None
    assert (slot.bytes == 0xFF).all()
    assert list(contents.slot_of) == [second]


def test_units_with_open_windows_stay(contents, units):
    for unit in units[:2]:
        contents.fill(unit, contents.free_slot())
    units[1].open_windows = 1
    contents.evict_all()
    assert list(contents.slot_of) == [units[1]]


def test_a_copy_in_is_unawaited_until_the_step_or_the_forward_ends(contents, units):
    for end in (contents.end_step, contents.release_for_host_writes):
        slot = contents.free_slot()
        contents.fill(units[0], slot)
        assert contents.unawaited_copy(units[0]) == [slot.ready]
        assert contents.unawaited_copy(units[1]) == []
        end()
        assert contents.unawaited_copy(units[0]) == []


def test_the_host_may_write_weights_only_when_their_copies_are_done(contents, units, streams):
    contents.fill(units[0], contents.free_slot())
    with pytest.raises(StreamOrderError):
        streams.writes(None, units[0].weights, "too early")


def test_the_host_may_write_weights_afterwards(contents, units, streams):
    contents.fill(units[0], contents.free_slot())
    contents.release_for_host_writes()
    assert not contents.slot_of
    streams.writes(None, units[0].weights, "in time")


def test_changed_tensors_are_written_home(contents, units, streams):
    unit, slot = units[0], contents.free_slot()
    contents.fill(unit, slot)
    streams.compute.wait_event(slot.ready)
    tensor = unit.tensors[0]
    changed = data_in(tensor, slot.bytes)
    with torch.no_grad():
        changed.fill_(3)
    contents.write_home(unit, {tensor: [changed]})
    assert (tensor.host == 3).all()
    assert streams.d2h in slot.readers
    contents.evict_all()
