"""What is timed by events is read when it is over, and never waited for."""

from __future__ import annotations

from offload.runtime.transfer import Telemetry


class Clock:
    """A device whose compute stands still for 5 ms at each wait, and is past the first `done` events."""

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
