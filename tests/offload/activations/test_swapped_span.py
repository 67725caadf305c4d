"""A swapped span: which bytes it has, when its device copy goes, and what it leaves when the last tensor goes."""

import weakref
from collections import deque

import pytest
import torch

from offload.activations.host_pool import PooledBlock
from offload.activations.policy import SpanRecord
from offload.activations.span_table import version_handle
from offload.activations.swapped_span import ByteRange, PackedTensor, SpanCopies, SwappedSpan
from offload.memory.host_memory import HostBlock
from offload.streams import registry
from offload.streams.transfer import PendingFree, Telemetry, Transfer


def span_of(tensor: torch.Tensor, released: deque | None = None) -> SwappedSpan:
    byte_range = ByteRange.of(tensor)
    block = PooledBlock(HostBlock(byte_range.nbytes, "test"))
    record = SpanRecord(0, byte_range.nbytes, saved_at=1)
    return SwappedSpan(
        0, record, byte_range, tensor.untyped_storage(), block, deque() if released is None else released
    )


def packed(span: SwappedSpan, tensor: torch.Tensor) -> PackedTensor:
    return PackedTensor(span, tensor, version_handle(tensor))


def come_back(span: SwappedSpan, streams: registry.Streams) -> PendingFree:
    memory = torch.zeros(span.byte_range.nbytes, dtype=torch.uint8)
    span.device_copy, span.ready_on = PendingFree(memory, streams.event(), "copy", streams.compute), []
    return span.device_copy


@pytest.mark.parametrize(
    ("tensor", "byte_range"),
    [
        (torch.zeros(1000), (0, 4000)),
        (torch.zeros(1000)[:100], (0, 400)),
        (torch.zeros(1000)[100:200], (256, 800)),
        # Half of the storage or more, or with holes: all of it.
        (torch.zeros(1000)[:500], (0, 4000)),
        (torch.zeros(1000)[::4], (0, 4000)),
        (torch.zeros(1000, dtype=torch.uint8)[300:301], (256, 301)),
    ],
)
def test_the_bytes_that_are_copied_for_a_tensor(tensor: torch.Tensor, byte_range: tuple[int, int]):
    assert ByteRange.of(tensor) == byte_range
    assert ByteRange.of(tensor).nbytes == byte_range[1] - byte_range[0]


def test_a_range_contains_what_lies_within_it():
    assert ByteRange(10, 20).contains(ByteRange(10, 20))
    assert ByteRange(10, 20).contains(ByteRange(12, 15))
    assert not ByteRange(10, 20).contains(ByteRange(9, 15))
    assert not ByteRange(10, 20).contains(ByteRange(12, 21))


def test_the_original_is_there_while_somebody_references_it():
    tensor = torch.arange(8.0)
    span = span_of(tensor)
    assert span.original().data_ptr() == tensor.data_ptr()
    del tensor
    assert span.original() is None
    assert span.storage.expired()


def test_the_device_copy_goes_when_every_tensor_was_unpacked_once(streams: registry.Streams):
    tensor = torch.arange(8.0)
    span = span_of(tensor)
    one, other = packed(span, tensor), packed(span, tensor[2:])
    for number in range(3):
        copy = come_back(span, streams)
        one.pass_number = span.tensor_unpacked(one.pass_number)
        assert span.device_copy is copy
        # A second time in one pass, as by a formula that asks twice, counts for the next.
        assert span.pass_number == number
        other.pass_number = span.tensor_unpacked(other.pass_number)
        assert span.device_copy is None
        assert one.pass_number == other.pass_number == span.pass_number == number + 1


def test_a_dropped_copy_is_found_while_somebody_references_it_by_streams_that_waited(streams: registry.Streams):
    tensor = torch.arange(8.0)
    span = span_of(tensor)
    copy = come_back(span, streams)
    assert span.dropped(streams.compute) is None
    span.drop()
    assert span.dropped(streams.compute) is None
    span.ready_on.append(streams.compute)
    assert span.dropped(streams.compute).data_ptr() == copy.tensor.data_ptr()
    assert span.dropped(streams.h2d) is None
    del copy
    assert span.dropped(streams.compute) is None


@pytest.mark.parametrize("waited", [True, False])
def test_the_last_tensor_leaves_the_block_and_a_copy_that_no_stream_waited_for(waited: bool, streams: registry.Streams):
    released, tensor = deque(), torch.arange(8.0)
    span = span_of(tensor, released)
    saved, block, copy = packed(span, tensor), span.block, come_back(span, streams)
    span.is_ahead = not waited
    span.ready_on = [streams.compute] if waited else []
    del span
    assert not released
    del saved
    ((serial, given_back, left, ahead_bytes),) = released
    assert (serial, given_back) == (0, block)
    assert left is (None if waited else copy)
    assert ahead_bytes == (0 if waited else 32)


def test_bytes_ahead_of_use_are_counted_once_and_given_back_by_the_dead(streams: registry.Streams):
    copies, released = SpanCopies(Transfer(streams, Telemetry(streams)), in_flight_bytes=0), deque()
    spans = [span_of(torch.zeros(length), released) for length in (10, 20)]
    for span in spans:
        copies.fetch(span)
        copies.mark_ahead(span, True)
    assert copies.ahead_bytes == 120
    copies.abandon(spans[0])
    copies.mark_ahead(spans[0], False)
    assert copies.ahead_bytes == 80
    del span, spans
    while released:
        copies.reclaim(released.popleft())
    assert copies.ahead_bytes == 0


def test_memory_is_leaving_as_long_as_it_is_kept_for_the_copy(streams: registry.Streams):
    tensor = torch.arange(8.0)
    span = span_of(tensor)
    assert not span.is_leaving
    pending = PendingFree(tensor, streams.event(), "activation", streams.compute)
    span.leaving = weakref.ref(pending)
    assert span.is_leaving
    del pending
    assert not span.is_leaving


def test_a_packed_tensor_is_a_view_of_the_bytes_that_came_back():
    whole = torch.arange(1000.0)
    tensor = whole[100:200].view(10, 10).t()
    span = span_of(tensor)
    saved = packed(span, tensor)
    copy = whole.view(torch.uint8)[span.byte_range.start : span.byte_range.stop].clone()
    found = saved.view(copy.untyped_storage(), span.byte_range.start)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()
    assert torch.equal(saved.view(whole.untyped_storage(), 0), tensor)


def test_a_packed_tensor_that_was_modified_is_reported():
    tensor = torch.zeros(8)
    saved = packed(span_of(tensor), tensor)
    saved.check()
    tensor[3:].add_(1)
    with pytest.raises(RuntimeError, match="is at version 1, saved at version 0"):
        saved.check()
