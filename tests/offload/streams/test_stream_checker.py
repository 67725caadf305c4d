"""The stream checker accepts accesses that events order, and names those that nothing orders."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from offload.streams.stream_checker import CheckedStreams, StreamOrderError


class Resource:
    def __str__(self) -> str:
        return "buffer"


@pytest.fixture
def streams() -> CheckedStreams:
    return CheckedStreams(torch.device("cpu"))


def test_a_read_behind_its_write_is_ordered_by_an_event(streams: CheckedStreams):
    buffer, done = Resource(), streams.event()
    streams.writes(streams.h2d, buffer, "copy in")
    done.record(streams.h2d)
    streams.compute.wait_event(done)
    streams.reads(streams.compute, buffer, "kernel")


def test_a_missing_wait_names_both_accesses(streams: CheckedStreams):
    buffer = Resource()
    streams.writes(streams.h2d, buffer, "copy in")
    with pytest.raises(StreamOrderError, match="buffer: 'kernel' on compute may run before 'copy in' on h2d is done"):
        streams.reads(streams.compute, buffer, "kernel")


def test_an_event_recorded_too_early_does_not_order(streams: CheckedStreams):
    buffer, done = Resource(), streams.event()
    streams.reads(streams.compute, buffer, "first kernel")
    done.record(streams.compute)
    streams.reads(streams.compute, buffer, "second kernel")
    streams.h2d.wait_event(done)
    with pytest.raises(StreamOrderError, match="second kernel"):
        streams.writes(streams.h2d, buffer, "copy in")


def test_an_event_never_recorded_does_not_order(streams: CheckedStreams):
    buffer = Resource()
    streams.writes(streams.h2d, buffer, "copy in")
    streams.compute.wait_event(streams.event())
    with pytest.raises(StreamOrderError):
        streams.reads(streams.compute, buffer, "kernel")


def test_order_passes_through_a_third_stream(streams: CheckedStreams):
    buffer, first, second = Resource(), streams.event(), streams.event()
    streams.writes(streams.h2d, buffer, "copy in")
    first.record(streams.h2d)
    streams.compute.wait_event(first)
    second.record(streams.compute)
    streams.d2h.wait_event(second)
    streams.writes(streams.d2h, buffer, "copy over")


def test_the_host_sees_a_copy_only_after_it_synchronises(streams: CheckedStreams):
    buffer, done = Resource(), streams.event()
    streams.writes(streams.d2h, buffer, "copy out")
    done.record(streams.d2h)
    with pytest.raises(StreamOrderError, match="'optimizer' on host"):
        streams.reads(None, buffer, "optimizer")
    done.synchronize()
    streams.reads(None, buffer, "optimizer")


def test_work_queued_after_the_host_wrote_sees_it(streams: CheckedStreams):
    buffer = Resource()
    streams.writes(None, buffer, "optimizer")
    streams.reads(streams.h2d, buffer, "copy in")
    with pytest.raises(StreamOrderError, match="'optimizer' on host may run before 'copy in' on h2d"):
        streams.writes(None, buffer, "optimizer")
    streams.synchronize()
    streams.writes(None, buffer, "optimizer")


def test_two_reads_need_no_order(streams: CheckedStreams):
    buffer = Resource()
    streams.reads(streams.h2d, buffer, "one")
    streams.reads(streams.compute, buffer, "other")


def test_each_thread_has_its_own_current_stream(streams: CheckedStreams):
    """As on a GPU: two models may train at the same time, each in a thread."""
    with streams.on(streams.h2d), ThreadPoolExecutor(1) as thread:
        assert thread.submit(lambda: streams.compute).result(300) is not streams.compute
