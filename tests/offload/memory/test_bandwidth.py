"""The bandwidth of the bus: measured in each direction, and the time of copies that go both ways."""

from __future__ import annotations

import pytest

from offload.memory import bandwidth
from offload.memory.bandwidth import Bandwidth, measure_bandwidth
from offload.streams import registry


def test_bandwidth_is_measured_each_way_and_both(streams: registry.Streams):
    speed = measure_bandwidth(streams, nbytes=2**20, repeats=3)
    assert min(speed.h2d, speed.d2h, speed.both) > 0.01


def test_each_direction_is_timed_with_its_own_copies(streams: registry.Streams, monkeypatch: pytest.MonkeyPatch):
    clock = [0.0]

    def takes(seconds: float):
        def copy(*_: object, **__: object) -> None:
            clock[0] += seconds

        return copy

    monkeypatch.setattr(bandwidth, "perf_counter", lambda: clock[0])
    monkeypatch.setattr(bandwidth.Transfer, "copy_in", takes(0.001))
    monkeypatch.setattr(bandwidth.Transfer, "copy_out", takes(0.003))
    speed = measure_bandwidth(streams, nbytes=10**6, repeats=3)
    # 1 MB in 1 ms is 1 GB/s.
    assert (speed.h2d, speed.d2h, speed.both) == pytest.approx((1.0, 1 / 3, 1 / 4))


def test_copies_both_ways_are_slower_while_both_last():
    bus = Bandwidth(h2d=50.0, d2h=40.0, both=25.0)
    assert bus.two_way_ms(50e6, 0) == pytest.approx(1.0)
    assert bus.two_way_ms(0, 40e6) == pytest.approx(1.0)
    # 25 MB each way at 25 GB/s, then the rest of the longer one alone.
    assert bus.two_way_ms(75e6, 25e6) == pytest.approx(1.0 + 1.0)
    assert bus.two_way_ms(25e6, 65e6) == pytest.approx(1.0 + 1.0)
