"""The processes that share the homes of one model, each with a device of its own. `NO_SHARERS` shares nothing.

Processes of one host share memory. Where several hosts train one model, each has its own homes, and gradients are
summed over all (hybrid sharding, as in PyTorch FSDP, Zhao et al. 2023).

The engine asks its sharers for an exchange of a few numbers and for a collective on the device. It imports no
torch.distributed: `training.parallel.sharers` implements them with it.

Every sharer makes the same calls in the same order: each of them waits for the same call of all others.
"""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch

# A process that waits first lets others run, then it sleeps, longer and longer. A sleep of 20 us takes 70 or more, by
# which the process is late for the next exchange, so that the others wait then: most waits end without one.
YIELD_S = 5e-4
SHORTEST_SLEEP_S, LONGEST_SLEEP_S = 20e-6, 1e-3
# Seconds between two checks that the process it waits for is still there.
LOOK_EVERY_S = 0.05
OWN_HOMES = "give each process a home of its own"
"""ends the message of an error that sharing alone brings about; who configures it adds how"""

Found = TypeVar("Found")


class SharerLostError(RuntimeError):
    """A sharer, number `rank` of its host, has ended or `hangs`: what all were to do together cannot be done."""

    def __init__(self, rank: int, problem: str, hangs: bool):
        super().__init__(problem)
        self.rank = rank
        self.hangs = hangs


class Sharers:
    """The processes that share homes; this one is number `rank` of the `count` of its host. Here it shares nothing.

    `first` is the number of its host's first among those of all `hosts`. A sharer that does not come for `limit_s`
    seconds counts as one that hangs. For one that has ended or hangs, every method raises an error: SharerLostError if
    known.
    """

    rank = first = 0
    count = hosts = 1
    limit_s = float("inf")

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        """Blocks the host until every sharer has given as many numbers; returns those of each, in the order of ranks.

        `what` names what they are exchanged for, in the error that is raised where a sharer does not come. `patient`: a
        sharer may come much later, because it loads weights, say. `everywhere`: with the sharers of all hosts.
        """
        return [list(numbers)]

    def attempt(self, call: Callable[[], None], what: str) -> None:
        """Makes a call for the purpose named; its SharerLostError becomes the error that other methods raise then."""
        call()

    def gather(self, whole: torch.Tensor, what: str) -> None:
        """Completes `whole` (uint8 on the device) on the current stream; sharer k gives the k-th of `count` slices.

        Only the sharers of one host take part. The host does not wait where the device has streams.
        """

    def sum(self, flat: torch.Tensor, what: str) -> None:
        """Makes `flat` (1-D on the device, its length a multiple of `count`) the sum over the sharers of all hosts.

        In its dtype, in the order of ranks, on the current stream: the host does not wait where the device has streams.
        """


NO_SHARERS = Sharers()


def meet(sharers: Sharers, what: str) -> None:
    """Blocks the host until every sharer of this host is here. `what` names the place."""
    sharers.exchange((0,), what, patient=True)


def exchange_bytes(sharers: Sharers, data: bytes, what: str) -> list[bytes]:
    """Blocks until every sharer of this host has given some bytes; returns those of each. `what` names them."""
    lengths = [length for (length,) in sharers.exchange((len(data),), what, patient=True)]
    words = -(-max(lengths) // 8)
    numbers = array("q", data.ljust(8 * words, b"\0"))
    found = sharers.exchange(numbers, what, patient=True) if words else [()] * sharers.count
    return [array("q", given).tobytes()[:length] for given, length in zip(found, lengths, strict=True)]


class Processes:
    """The process of each of `sharers`; every sharer makes one at the same time, and waits for the others."""

    def __init__(self, sharers: Sharers):
        own = os.getpid(), _started(os.getpid()) or 0
        self._processes = sharers.exchange(own, "their processes", patient=True)

    def awaited(self, rank: int, read: Callable[[], Found | None], began: float, limit_s: float) -> Found:
        """Blocks the host until `read` returns what sharer `rank` gives, and no longer None; returns that.

        Raises SharerLostError where that has ended, or is not there `limit_s` seconds after `began` (`time.monotonic`).
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
