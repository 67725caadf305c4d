"""Step times, by the device's events where it has any."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from offload.streams import registry
from training.metrics import step_timer
from training.metrics.step_timer import CoreWaits, StepTimer, waited_s


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


@pytest.mark.parametrize(
    ("waits", "passed_s", "told"),
    [("0 9000000000 5", 30, True), ("0 3000000000 5", 30, False), ("0 9000000000 5", 9, False), ("gone", 30, False)],
)
def test_waiting_for_cores_is_told_in_a_line(
    waits: str, passed_s: float, told: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog
):
    statistics = tmp_path / "schedstat"
    statistics.write_text("0 0 1" if told or waits != "gone" else waits)
    times = iter([100.0, 100.0 + passed_s])
    monkeypatch.setattr(step_timer, "STATISTICS", statistics)
    monkeypatch.setattr(step_timer, "monotonic", lambda: next(times))
    waiting = CoreWaits()
    statistics.write_text(waits)
    told_of = waiting.warn()
    lines = [record.message for record in caplog.records]
    assert told_of == lines
    assert [line.partition(" of its time")[0] for line in lines] == (
        ["the machine was busy: the run waited for a core in 30%"] if told else []
    )


def test_linux_tells_the_time_in_its_queue(monkeypatch: pytest.MonkeyPatch):
    if step_timer.STATISTICS.exists():
        assert waited_s() >= 0
    monkeypatch.setattr(step_timer, "STATISTICS", Path("/nowhere"))
    assert waited_s() is None
