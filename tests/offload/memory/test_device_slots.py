"""Device slots have equal size, and are found by the tensors that lie in them."""

import pytest
import torch

from offload.memory.device_slots import DeviceSlots
from offload.streams import registry
from offload.streams.stream_checker import CheckedStreams


def test_a_slot_is_found_by_a_tensor_that_lies_in_it(streams: registry.Streams):
    slots = DeviceSlots(2, 1024, streams)
    inside = slots.all[1].bytes[256:512].view(torch.float32).view(8, 8).t()
    assert slots.slot_of(inside) is slots.all[1]
    assert slots.slot_of(inside.clone()) is None
    assert slots.slot_of(torch.eye(3).to_sparse()) is None
    assert slots.nbytes == 2048


def test_a_slot_begins_with_its_first_byte_and_ends_with_its_last(streams: registry.Streams):
    slots = DeviceSlots(2, 64, streams)
    for slot in slots:
        for inside in (slot.bytes[:1], slot.bytes[-1:], slot.bytes[64:], slot.bytes.view(torch.float32)[3:5]):
            assert slots.slot_of(inside) is slot


def test_slots_of_the_meta_device_are_found_although_they_have_no_memory():
    slots = DeviceSlots(3, 64, CheckedStreams(torch.device("meta")))
    for slot in slots:
        assert slots.slot_of(slot.bytes[8:16]) is slot
    assert slots.slot_of(torch.empty(64, dtype=torch.uint8, device="meta")) is None


@pytest.mark.parametrize("count", [0, 2])
def test_slots_without_bytes_hold_no_tensor(count: int, streams: registry.Streams):
    slots = DeviceSlots(count, 0, streams)
    assert len(list(slots)) == count
    assert slots.slot_of(torch.empty(0)) is None
