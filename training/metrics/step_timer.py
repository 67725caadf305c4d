"""Step times by the device's own clock, without making the host wait; and how long this thread waited for a core."""

import logging
from pathlib import Path
from time import monotonic, perf_counter

from offload import Streams

# In this file Linux counts the nanoseconds that this thread was on a core, then those that it waited for one.
STATISTICS = Path("/proc/thread-self/schedstat")
# The share of waiting from which on a run warns, and the seconds below which it never does.
BUSY, SHORT_S = 0.2, 10.0

logger = logging.getLogger(__name__)


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
        self.discard()
        return times_ms

    def discard(self) -> None:
        """Forgets the steps since the last call of `collect`."""
        self._steps.clear()

    def _now(self):
        if not self._streams.asynchronous:
            return perf_counter()
        event = self._streams.event(timing=True)
        event.record(self._streams.compute)
        return event


class CoreWaits:
    """Measures how long this thread waits for a core, from when it is made."""

    def __init__(self):
        self._start_s, self._waited_s = monotonic(), waited_s()

    def warn(self) -> list[str]:
        """Warns if the thread has waited for more than `BUSY` of the time, and returns the warning, if there is one.

        Call it from the same thread.
        """
        passed_s = monotonic() - self._start_s
        if self._waited_s is None or passed_s < SHORT_S:
            return []
        share = (waited_s() - self._waited_s) / passed_s
        if share <= BUSY:
            return []
        warning = (
            f"the machine was busy: the run waited for a core in {share:.0%} of its time, while other programs or its"
            " own threads had them, so its times are longer than on a free machine"
        )
        logger.warning(warning)
        return [warning]


def waited_s() -> float | None:
    """Returns the seconds that this thread has waited for a core since it began; None if the system does not say."""
    try:
        return int(STATISTICS.read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return None
