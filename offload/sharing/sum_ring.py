"""Device memory in which sharers sum gradients: each sum takes the next bytes, which are the same ones on all of them.

A sum is over when its buffers have been copied home. The memory goes round, so a later sum waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import accumulate

import torch

from offload.sharing.links import Links
from offload.sharing.slices import SHARED_ALIGNMENT_BYTES
from offload.streams.deferred_free import PendingFree
from offload.streams.registry import Streams

# Sums that have room at once: one that is made, and one that goes home.
SUMS_IN_RING = 2


def ring_bytes(sums: Sequence[int]) -> int:
    """Returns the bytes of a ring for sums of so many bytes.

    Each has room, and SUMS_IN_RING of the size up to which sums make half of all bytes: an embedding, which may be much
    larger than a block, comes once in a step.
    """
    sizes = sorted(map(in_steps, sums))
    upto = list(accumulate(sizes))
    usual = next((size for size, total in zip(sizes, upto, strict=True) if 2 * total >= upto[-1]), 0)
    return max([SUMS_IN_RING * usual, *sizes])


class SumRing:
    """`nbytes` for sums, on the device of `streams`. All sharers take the same of it in one order."""

    def __init__(self, links: Links, streams: Streams, nbytes: int):
        self._streams = streams
        self._nbytes = nbytes
        self._memory = links.allocate(nbytes) if nbytes else None
        self._end = 0
        # Of the sums since the memory last went round, and of those of the round before that are not overwritten yet.
        self._taken: deque[tuple[int, int, PendingFree]] = deque()

    def has_room(self, nbytes: int) -> bool:
        """Tells whether a sum of `nbytes` has room."""
        return in_steps(nbytes) <= self._nbytes

    def take(self, sizes: Sequence[tuple[torch.dtype, int]], name: str) -> list[PendingFree]:
        """Returns a buffer for each dtype and number of elements, for the gather stream to write from now on.

        The caller sets `done` of each to the end of what reads it last, before it takes the next ones.
        """
        lengths = [in_steps(dtype.itemsize * size) for dtype, size in sizes]
        if self._end + sum(lengths) > self._nbytes:
            self._end = 0
        found = []
        for (dtype, size), length in zip(sizes, lengths, strict=True):
            start, self._end = self._end, self._end + length
            self._await_those_in(start, self._end)
            memory = self._memory[start : start + dtype.itemsize * size].view(dtype)
            found.append(PendingFree(memory, self._streams.event(), name, self._streams.gather))
            self._taken.append((start, self._end, found[-1]))
        return found

    def _await_those_in(self, start: int, end: int) -> None:
        """Makes the gather stream wait for what uses these bytes, which is over or belongs to earlier sums."""
        gather = self._streams.gather
        kept = deque()
        for earlier in self._taken:
            first, last, buffer = earlier
            if last <= start or end <= first:
                kept.append(earlier)
                continue
            gather.wait_event(buffer.done)
            self._streams.writes(gather, buffer, "reuse")
        self._taken = kept


def in_steps(nbytes: int) -> int:
    """Returns the bytes that a buffer of `nbytes` takes up. Kernels add in another order at other alignments."""
    return -(-nbytes // SHARED_ALIGNMENT_BYTES) * SHARED_ALIGNMENT_BYTES
