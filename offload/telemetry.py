"""What a mode did to the bus: bytes each way and the time that compute stood still for it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

from offload.registry import Event, Stream, Streams

# Two events with nothing to wait for between them are microseconds apart, and a step has a thousand such pairs.
RESOLUTION_MS = 0.01


class Telemetry:
    """Counters of one attached model since it was attached: bytes copied in and out, ms of compute stalled."""

    def __init__(self, streams: Streams):
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.stall_ms = 0.0
        self._streams = streams
        self._pending: deque[tuple] = deque()

    @contextmanager
    def stall(self, stream: Stream) -> Iterator[None]:
        """Counts the time that `stream` spends in the waits queued inside the block."""
        if not self._streams.asynchronous:
            yield
            return
        before, after = self._streams.event(timing=True), self._streams.event(timing=True)
        before.record(stream)
        yield
        after.record(stream)
        self._pending.append((before, after))

    def timestamp(self) -> Event | None:
        """An event that will know when compute came here; None on a device without a clock."""
        if not self._streams.asynchronous:
            return None
        event = self._streams.event(timing=True)
        event.record(self._streams.compute)
        return event

    def collect(self) -> None:
        """Reads the timings that are over; a later call reads the others."""
        while self._pending and self._pending[0][1].query():
            before, after = self._pending.popleft()
            wait_ms = before.elapsed_time(after)
            if wait_ms > RESOLUTION_MS:
                self.stall_ms += wait_ms
