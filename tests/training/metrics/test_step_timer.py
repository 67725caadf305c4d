"""Step times, by the device's events where it has any."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from offload.streams import registry
from training.metrics import step_timer
from training.metrics.step_timer import StepTimer


def test_without_asynchronous_streams_the_host_clock_times_a_step(monkeypatch: pytest.MonkeyPatch):
    clock = [100.0]
    monkeypatch.setattr(step_timer, "perf_counter", lambda: clock[0])
    streams = registry.acquire("cpu")
    timer = StepTimer(streams)
    for seconds in (0.25, 0.5):
        timer.start()
        clock[0] += seconds
        timer.stop()
        clock[0] += 4
    assert timer.collect() == [250.0, 500.0]
    assert timer.collect() == []
    registry.release(streams)


class Event:
    """An event that notes on which stream it was recorded, and when."""

    def __init__(self, clock: list[float]):
        self._clock = clock

    def record(self, stream: str) -> None:
        assert stream == "compute"
        self.ms = self._clock[0]

    def elapsed_time(self, end: Event) -> float:
        return end.ms - self.ms


def test_with_streams_events_time_a_step_and_the_host_waits_once():
    clock, waits = [0.0], []
    streams = SimpleNamespace(
        asynchronous=True,
        compute="compute",
        event=lambda timing: Event(clock),
        synchronize=lambda: waits.append(clock[0]),
    )
    timer = StepTimer(streams)
    for ms in (3.0, 4.5):
        timer.start()
        clock[0] += ms
        timer.stop()
        clock[0] += 100
    assert waits == []
    assert timer.collect() == [3.0, 4.5]
    assert waits == [207.5]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_times_its_own_work():
    streams = registry.acquire("cuda")
    timer = StepTimer(streams)
    timer.start()
    torch.cuda._sleep(10**8)
    timer.stop()
    (ms,) = timer.collect()
    assert ms > 10
    registry.release(streams)
