"""Memory in which sharers sum gradients: where those of a unit lie, what each sends home, and the ring on the device.

Each sum takes the next bytes of the ring, which are the same ones on all sharers. It is over when its buffers have been
copied home. The memory goes round, so a later sum waits for that.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch

from offload.memory.host_memory import HostArena, aligned
from offload.sharing.links import Links
from offload.sharing.sharers import Sharers
from offload.sharing.slices import SHARED_ALIGNMENT_BYTES, slices_of
from offload.streams.registry import Streams
from offload.streams.transfer import PendingFree
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Sums that have room at once: one that is made, and one that goes home.
SUMS_IN_RING = 2


class SumHome:
    """Memory that `sharers` share for the sums of a unit's gradients: one block, in which each tensor has its place.

    Without an arena they have no memory: each sharer sends its slices to their updates alone.
    """

    def __init__(self, unit: OffloadUnit, arena: HostArena | None, sharers: Sharers):
        self._unit, self._sharers = unit, sharers
        self._layout: SumLayout | None = None
        self.block = None if arena is None else arena.allocate(unit.gradient_bytes, f"gradients of {unit}")
        self.offsets: dict[UnitTensor, int] = {}
        self.gradients: dict[UnitTensor, torch.Tensor] = {}
        end = 0
        for tensor in unit.trained:
            self.offsets[tensor] = end
            if self.block is not None:
                self.gradients[tensor] = tensor.gradient.over(self.block.piece(end, tensor.nbytes))
            end += aligned(tensor.nbytes, unit.alignment)

    def layout(self) -> SumLayout:
        """Returns the layout of the tensors that train now."""
        trained = self._unit.trained
        if self._layout is None or self._layout.tensors != trained:
            self._layout = SumLayout(self._unit, trained, self, self._sharers.count, self._sharers.rank)
        return self._layout


class SumPart(NamedTuple):
    """A part of a flat buffer that this process sends home: its place there, and at home; it has these tensors."""

    place: slice
    home: torch.Tensor
    tensors: list[UnitTensor]


class SumLayout:
    """Places of the gradients of a unit in flat buffers, one for each dtype, and which parts go home from here."""

    def __init__(self, unit: OffloadUnit, tensors: list[UnitTensor], home: SumHome, count: int, rank: int):
        self.tensors = tensors
        self.sizes: list[tuple[torch.dtype, int]] = []
        self.places: dict[UnitTensor, tuple[int, int]] = {}
        """the buffer and the start of each"""
        self.own = {tensor: slices_of(unit, count).elements(tensor, rank) for tensor in tensors}
        """the elements of each that are this process's"""
        for number, dtype in enumerate(dict.fromkeys(tensor.dtype for tensor in tensors)):
            # As at home. Kernels add in another order where memory is aligned to less than 512.
            step, end = SHARED_ALIGNMENT_BYTES // dtype.itemsize, 0
            for tensor in tensors:
                if tensor.dtype == dtype:
                    self.places[tensor] = number, end
                    end += -(-tensor.host.numel() // step) * step
            self.sizes.append((dtype, -(-end // (step * count)) * step * count))
        has_home = home.block is not None
        self.parts = [list(self._parts(home, number)) if has_home else [] for number in range(len(self.sizes))]
        self.in_slices = [self._divides(unit, number, count) for number in range(len(self.sizes))]
        """for each buffer whether what process k sends home is in the k-th of its `count` slices, for all k"""

    @property
    def nbytes(self) -> int:
        """The bytes of all buffers."""
        return sum(dtype.itemsize * size for dtype, size in self.sizes)

    def views(self, buffers: Sequence[torch.Tensor]) -> dict[UnitTensor, torch.Tensor]:
        """Returns the part of its buffer for each gradient, in its shape."""
        found = {}
        for tensor, (number, start) in self.places.items():
            found[tensor] = buffers[number][start : start + tensor.shape.numel()].view(tensor.shape)
        return found

    def _divides(self, unit: OffloadUnit, number: int, count: int) -> bool:
        slices, size = slices_of(unit, count), self.sizes[number][1] // count
        return all(
            rank * size <= start + part.start and start + part.stop <= (rank + 1) * size
            for tensor, (buffer, start) in self.places.items()
            for rank in range(count)
            for part in slices.elements(tensor, rank)
            if buffer == number
        )

    def _parts(self, home: SumHome, number: int) -> Iterator[SumPart]:
        """Yields the parts of a buffer. Neighbours at home that are as far apart in the buffer are one part."""
        size = self.sizes[number][0].itemsize
        # Places in the buffer, and the first byte at home.
        runs: list[tuple[int, int, int, list[UnitTensor]]] = []
        for tensor, (buffer, start) in self.places.items():
            if buffer != number or tensor not in home.offsets:
                continue
            for part in self.own[tensor]:
                first, last = start + part.start, start + part.stop
                at_home = home.offsets[tensor] + part.start * size
                if runs and at_home - runs[-1][2] == (first - runs[-1][0]) * size:
                    begin, _, place, tensors = runs.pop()
                    runs.append((begin, last, place, [*tensors, tensor]))
                else:
                    runs.append((first, last, at_home, [tensor]))
        for first, last, at_home, tensors in runs:
            memory = home.block.piece(at_home, (last - first) * size).view(self.sizes[number][0])
            yield SumPart(slice(first, last), memory, tensors)


def ring_bytes(sums: Sequence[int]) -> int:
    """Returns the bytes of a ring for sums of so many bytes: room for the largest, and for SUMS_IN_RING usual ones.

    Usual is the size up to which sums make half of all bytes: an embedding, which may be larger, comes once in a step.
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
