"""The core's own filler: a block of host memory for each unit, one copy into a slot."""

import pytest
import torch
from torch import nn

from offload.memory import host_memory
from offload.memory.device_slots import DeviceSlots
from offload.memory.host_memory import HostArena
from offload.streams.registry import Streams
from offload.streams.transfer import Telemetry, Transfer
from offload.weights.gradients.seams import Updates
from offload.weights.prefetching.slot_contents import Filler
from offload.weights.units.partition import CutModel, CutPoint, cut
from offload.weights.units.unit import OffloadUnit

CPU = torch.device("cpu")


def parts() -> CutModel:
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    return cut(model, [CutPoint(str(index), layer) for index, layer in enumerate(model)])


def test_a_unit_comes_home_and_into_a_slot_in_one_copy_after_its_updates(streams: Streams):
    asked = []

    class Asked(Updates):
        def before_onload(self, unit: OffloadUnit) -> None:
            asked.append(unit)

        def is_pending(self, unit: OffloadUnit) -> bool:
            return unit.name == "1"

    found, transfer = parts(), Transfer(streams, Telemetry(streams))
    filler = Filler(found, transfer, HostArena(CPU), found.gradient_bytes)
    filler.updates = Asked()
    (slot,) = DeviceSlots(1, filler.slot_bytes, streams, filler.allocate_slot)
    first, second = found.units
    for unit in found.units:
        filler.bring_home(unit)
    assert filler.is_ready(first, slot)
    assert not filler.is_ready(second, slot)
    assert asked == [first]
    filler.await_ready(second, slot)
    filler.fill(second, slot)
    assert asked == [first, second]
    assert torch.equal(slot.bytes[: second.nbytes], second.weights.bytes)
    assert filler.counters().host_pageable_bytes == found.unit_bytes


def test_too_little_memory_is_found_before_any_is_taken(streams: Streams, monkeypatch: pytest.MonkeyPatch):
    found = parts()
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda **_: found.unit_bytes + 9)
    Filler(found, Transfer(streams, Telemetry(streams)), arena := HostArena(CPU), gradient_bytes=9)
    with pytest.raises(MemoryError, match="are needed"):
        Filler(found, Transfer(streams, Telemetry(streams)), arena, gradient_bytes=10)
    assert not arena.pageable_bytes
