"""The processes of the sharers of a host: whether each of them is still there, and waits that end where one is not."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TypeVar

from offload.sharing.sharers import SharerLostError, Sharers

# A process that waits first lets others run, then it sleeps, longer and longer. A sleep of 20 us takes 70 or more, by
# which the process is late for the next exchange, so that the others wait then: most waits end without one.
YIELD_S = 5e-4
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3
# Seconds between two checks that the process it waits for is still there.
LOOK_EVERY_S = 0.05

Found = TypeVar("Found")


class Processes:
    """The process of each of `sharers`; every sharer makes one at the same time, and waits for the others."""

    def __init__(self, sharers: Sharers):
        own = os.getpid(), _started(os.getpid()) or 0
        self._processes = sharers.exchange(own, "their processes", patient=True)

    def awaited(self, rank: int, read: Callable[[], Found | None], began: float, limit_s: float) -> Found:
        """Blocks the host until `read` returns what sharer `rank` gives, and no longer None; returns that.

        Raises SharerLostError if the process of the sharer has ended, or has given nothing `limit_s` seconds after
        `began`, a time of `time.monotonic`.
        """
        sleeps_at = time.monotonic() + YIELD_S
        while (found := read()) is None and time.monotonic() < sleeps_at:
            os.sched_yield()
        if found is not None:
            return found
        pause_s, look = SHORTEST_SLEEP_S, time.monotonic() + LOOK_EVERY_S
        while (found := read()) is None:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_SLEEP_S)
            if time.monotonic() < look:
                continue
            lost = self.lost(rank, time.monotonic() - began, limit_s)
            # It may have come before its end, or while this process was stopped.
            if (found := read()) is not None:
                break
            if lost is not None:
                raise lost
            look = time.monotonic() + LOOK_EVERY_S
        return found

    def lost(self, rank: int, waited_s: float, limit_s: float) -> SharerLostError | None:
        """Returns what is wrong with a sharer that has been waited for; None if nothing is."""
        process, started = self._processes[rank]
        if _started(process) != started:
            return SharerLostError(rank, f"the process {process} of rank {rank} has ended", hangs=False)
        if waited_s > limit_s:
            return SharerLostError(rank, f"rank {rank} did not come within {limit_s:g} seconds", hangs=True)
        return None


def _started(process: int) -> int | None:
    """Returns when a process was started, in ticks since the system was; None if it has ended."""
    try:
        with open(f"/proc/{process}/stat", "rb") as file:
            # The name before it is in brackets, and may have any character.
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])
