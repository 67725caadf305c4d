"""Step times measured on the device's own clock, without making the host wait."""

from __future__ import annotations

from time import perf_counter

from offload.runtime.registry import Streams


class StepTimer:
    """Times steps by events on the compute stream; on a device without streams, by the host's clock."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._steps: list[tuple] = []

    def start(self) -> None:
        """A step begins."""
        self._start = self._now()

    def stop(self) -> None:
        """The step has been queued to its end, the optimizer's update included."""
        self._steps.append((self._start, self._now()))

    def collect(self) -> list[float]:
        """The ms of each step since the last call. The host waits for the device: call it where a step is logged."""
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
