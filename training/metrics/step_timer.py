"""Step times measured by the device's own clock, without making the host wait."""

from __future__ import annotations

from time import perf_counter

from offload import Streams


class StepTimer:
    """Times steps with events on the compute stream; on a device without streams, with the host's clock."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._steps: list[tuple] = []

    def start(self) -> None:
        """Marks the start of a step."""
        self._start = self._now()

    def stop(self) -> None:
        """Marks the end of the step, when its last work is queued, the optimizer's update included."""
        self._steps.append((self._start, self._now()))

    def collect(self) -> list[float]:
        """Returns the ms of each step since the last call. Waits for the device: call it where a step is logged."""
        if self._streams.asynchronous:
            self._streams.synchronize()
            times_ms = [start.elapsed_time(end) for start, end in self._steps]
        else:
            times_ms = [(end - start) * 1e3 for start, end in self._steps]
        self._steps.clear()
        return times_ms

    def _now(self):
        if not self._streams.asynchronous:
            return perf_counter()
        event = self._streams.event(timing=True)
        event.record(self._streams.compute)
        return event
