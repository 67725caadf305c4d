"""Where the gradients of a unit lie while its sharers sum them, and which parts of the sums each of them sends home."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch

from offload.memory.host_memory import HostArena, aligned
from offload.sharing.slices import SHARED_ALIGNMENT_BYTES, slices_of
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor


class SumHome:
    """Memory that processes share for the sums of a unit's gradients: one block, in which each tensor has its place."""

    def __init__(self, unit: OffloadUnit, arena: HostArena):
        self.block = arena.allocate(unit.gradient_bytes, f"gradients of {unit}")
        self.offsets: dict[UnitTensor, int] = {}
        self.gradients: dict[UnitTensor, torch.Tensor] = {}
        end = 0
        for tensor in unit.trained:
            self.offsets[tensor] = end
            self.gradients[tensor] = tensor.gradient_over(self.block.piece(end, tensor.nbytes))
            end += aligned(tensor.nbytes, unit.alignment)


class SumPart(NamedTuple):
    """A part of a flat buffer that this process sends home: its place there, and at home; it has these tensors."""

    place: slice
    home: torch.Tensor
    tensors: list[UnitTensor]


class SumLayout:
    """Where the gradients of a unit lie in flat buffers, one for each dtype, and which parts go home from here."""

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
        self.parts = [list(self._parts(home, number)) for number in range(len(self.sizes))]
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
