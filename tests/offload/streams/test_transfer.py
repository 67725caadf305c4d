"""Copies are counted and ordered by events; timings are read when they are over, and never waited for."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from offload.streams import registry
from offload.streams.stream_checker import StreamOrderError
from offload.streams.transfer import LEVELS, Counters, Telemetry, Transfer, profiled, upload


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
