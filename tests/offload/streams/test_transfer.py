"""Copies are counted and ordered by events; memory that one still uses is freed when its stream has waited for it."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from offload.streams import registry
from offload.streams.stream_checker import StreamOrderError
from offload.streams.transfer import (
    LEVELS,
    Counters,
    DeferredFrees,
    PendingFree,
    StashedTensors,
    Telemetry,
    Transfer,
    profiled,
    upload,
)
from offload.torch_private.torch_internals import StorageWeakRef


class Clock:
    """Streams of a device whose compute waits 5 ms at each wait, and has passed the first `done` events."""

    asynchronous = True
    compute = None

    def __init__(self) -> None:
        self.recorded = self.done = 0

    def event(self, timing: bool = False) -> Tick:
        assert timing
        return Tick(self)


class Tick:
    def __init__(self, clock: Clock):
        self._clock = clock

    def record(self, stream: object) -> None:
        self.number = self._clock.recorded
        self._clock.recorded += 1

    def query(self) -> bool:
        return self.number < self._clock.done

    def elapsed_time(self, later: Tick) -> float:
        assert later.query(), "not over yet"
        return 5.0 * (later.number - self.number)


def test_waits_count_once_when_they_are_over():
    clock = Clock()
    telemetry = Telemetry(clock)
    for _ in range(3):
        with telemetry.stall(None):
            pass
    seen = []
    for done in (0, 1, 2, 5, 6, 6):
        clock.done = done
        telemetry.collect()
        seen.append(telemetry.stall_ms)
    assert seen == [0, 0, 5, 10, 15, 15]


def test_a_device_without_a_clock_is_not_timed(streams):
    telemetry = Telemetry(streams)
    with telemetry.stall(streams.compute):
        pass
    telemetry.collect()
    assert telemetry.timestamp() is None
    assert telemetry.stall_ms == 0


@pytest.fixture
def transfer(streams: registry.Streams) -> Transfer:
    return Transfer(streams, Telemetry(streams))


def test_copies_move_bytes_and_are_counted_each_way(transfer: Transfer):
    host, device = torch.arange(6.0), torch.zeros(6)
    transfer.copy_in(device, host, done=transfer.streams.event(), what="weights")
    assert torch.equal(device, host)
    transfer.copy_out(host[:2], device[4:], done=transfer.streams.event(), what="gradient")
    assert host[:2].tolist() == [4.0, 5.0]
    assert (transfer.telemetry.h2d_bytes, transfer.telemetry.d2h_bytes) == (24, 8)


@pytest.mark.parametrize("way", ["in", "out"])
def test_the_event_of_a_copy_orders_what_waits_for_it(way: str, transfer: Transfer):
    streams, resource, done = transfer.streams, torch.nn.Identity(), transfer.streams.event()
    streams.writes(streams.h2d if way == "in" else streams.d2h, resource, "copy")
    copy = transfer.copy_in if way == "in" else transfer.copy_out
    copy(torch.zeros(2), torch.ones(2), done=done, what="copy")
    with pytest.raises(StreamOrderError, match="'kernel' on compute may run before 'copy'"):
        streams.reads(streams.compute, resource, "kernel")
    transfer.await_on(streams.compute, done)
    streams.reads(streams.compute, resource, "kernel")


def test_streams_are_ordered_after_compute(transfer: Transfer):
    streams, resource = transfer.streams, torch.nn.Identity()
    streams.writes(streams.compute, resource, "kernel")
    transfer.after_compute(streams.h2d)
    streams.reads(streams.h2d, resource, "copy")
    with pytest.raises(StreamOrderError, match="'copy' on d2h may run before 'kernel'"):
        streams.reads(streams.d2h, resource, "copy")


def test_on_a_device_without_streams_all_of_a_copys_time_is_stall(transfer: Transfer):
    transfer.copy_in(torch.zeros(1 << 20), torch.ones(1 << 20), done=transfer.streams.event(), what="weights")
    assert transfer.telemetry.stall_ms > 0


def test_a_copy_is_named_in_a_profile_and_only_there(transfer: Transfer):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        transfer.copy_in(torch.zeros(2), torch.ones(2), done=transfer.streams.event(), what="unit 3")
        with profiled("mine"):
            pass
    assert {"copy in unit 3", "mine"} <= {event.key for event in profile.key_averages()}
    assert type(profiled("mine")).__name__ == "nullcontext"


def test_an_upload_to_the_host_is_the_tensor_itself():
    batch = torch.arange(4)
    assert upload(batch, torch.device("cpu")) is batch


def distinct(factor: int) -> Counters:
    return Counters(**{entry.name: factor * (index + 1) for index, entry in enumerate(fields(Counters))})


def test_parts_of_a_mode_add_up_levels_too():
    assert distinct(2) + distinct(3) == distinct(5)
    assert distinct(2) + Counters() == distinct(2)


def test_a_difference_is_the_growth_and_has_the_levels_of_the_later_reading():
    later, earlier = distinct(5), distinct(3)
    grown = later - earlier
    for entry in fields(Counters):
        expected = distinct(5) if entry.name in LEVELS else distinct(2)
        assert getattr(grown, entry.name) == getattr(expected, entry.name), entry.name


def test_what_nobody_times_stays_unknown():
    unknown = Counters(stall_ms=None, h2d_bytes=3)
    assert (unknown + Counters(stall_ms=1.0)).stall_ms is None
    assert (Counters(stall_ms=1.0) + unknown).stall_ms is None
    assert (unknown - unknown).stall_ms is None
    assert (unknown + unknown).h2d_bytes == 6


NBYTES = 100


def copied_out(transfer: Transfer) -> tuple[PendingFree, StorageWeakRef]:
    """Queues the copy of a new tensor of NBYTES; returns the pending free and a weak reference to the memory."""
    streams, tensor = transfer.streams, torch.zeros(NBYTES, dtype=torch.uint8)
    pending = PendingFree(tensor, streams.event(), "tensor", streams.compute)
    streams.writes(streams.compute, pending, "forward")
    transfer.after_compute(streams.d2h)
    streams.reads(streams.d2h, pending, "copy out")
    transfer.copy_out(torch.zeros_like(tensor), tensor, done=pending.done, what="tensor")
    return pending, StorageWeakRef(tensor.untyped_storage())


def fill(queue: DeferredFrees | StashedTensors, transfer: Transfer, count: int) -> list[StorageWeakRef]:
    memory = []
    for _ in range(count):
        pending, reference = copied_out(transfer)
        queue.add(pending)
        del pending
        memory.append(reference)
    return memory


def freed(memory: list[StorageWeakRef]) -> list[bool]:
    return [reference.expired() for reference in memory]


def test_the_oldest_memory_is_freed_beyond_the_limit(transfer: Transfer):
    frees = DeferredFrees(transfer, 2 * NBYTES)
    memory = fill(frees, transfer, 4)
    assert freed(memory) == [True, True, False, False]
    frees.release()
    assert freed(memory) == [True] * 4


@pytest.mark.parametrize("limit", [0, NBYTES - 1])
def test_the_newest_memory_stays_though_it_is_larger_than_the_limit(transfer: Transfer, limit: int):
    frees = DeferredFrees(transfer, limit)
    memory = fill(frees, transfer, 2)
    assert freed(memory) == [True, False]


def test_memory_is_reused_after_its_copy(transfer: Transfer):
    pending, _ = copied_out(transfer)
    with pytest.raises(StreamOrderError, match="tensor: 'reuse' on compute may run before 'copy out' on d2h is done"):
        transfer.streams.writes(pending.owner, pending, "reuse")
    frees = DeferredFrees(transfer, 10 * NBYTES)
    frees.add(pending)
    frees.release()
    transfer.streams.writes(pending.owner, pending, "reuse")


def test_only_the_stream_that_the_memory_was_allocated_on_waits(transfer: Transfer):
    streams = transfer.streams
    pending, _ = copied_out(transfer)
    frees = DeferredFrees(transfer, 10 * NBYTES)
    frees.add(pending)
    with streams.on(streams.h2d):
        frees.release()
    streams.writes(pending.owner, pending, "reuse")
    with pytest.raises(StreamOrderError, match="on h2d may run before"):
        streams.writes(streams.h2d, pending, "reuse by another stream")


def test_stashed_memory_stays_while_there_is_room(transfer: Transfer):
    stashed = StashedTensors(DeferredFrees(transfer, 0))
    memory = fill(stashed, transfer, 4)
    stashed.fit_into(4 * NBYTES)
    assert stashed.nbytes == 4 * NBYTES
    assert freed(memory) == [False] * 4
    stashed.fit_into(2 * NBYTES - 1)
    # The three oldest have left; of these, the deferred frees keep the newest.
    assert stashed.nbytes == NBYTES
    assert freed(memory) == [True, True, False, False]
    stashed.release()
    assert stashed.nbytes == 0
    assert freed(memory) == [True] * 4
