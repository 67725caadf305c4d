"""Divides the bytes of a unit among the processes that share its home: into chunks, and each chunk into equal slices.

A process copies in its slice of each chunk, and the chunk is gathered while the slice of the next is being copied
(ZeRO-3 gathers whole parameters so, Rajbhandari et al. 2020). The slices that a process copies in are those that it
updates: so its own updates are the only ones that its copies have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from offload.sharing.sharers import OWN_HOMES
from offload.weights.units.partition import CutModel, Window
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor

# The alignment of tensors that processes share, and of their slices: 256 numbers, a block of states in 8 bits.
SHARED_ALIGNMENT_BYTES = 1024

# The gather of a unit overlaps with the copy of the next. Only where a unit takes long are its own two to overlap, in
# chunks: each costs the host a copy and a collective more.
CHUNKS = 2
LEAST_CHUNK_BYTES = 512 * 2**20


@dataclass(frozen=True)
class Slices:
    """The slices of a flat buffer of `nbytes`, divided among `count` processes.

    Each slice begins at a multiple of SHARED_ALIGNMENT_BYTES. The last ones may lie partly or wholly behind the end.
    """

    nbytes: int
    count: int

    @property
    def chunk_bytes(self) -> int:
        """The bytes of each chunk, the last one included."""
        chunks = CHUNKS if self.nbytes >= CHUNKS * LEAST_CHUNK_BYTES else 1
        step = self.count * SHARED_ALIGNMENT_BYTES
        return -(-self.nbytes // (chunks * step)) * step

    @property
    def padded_bytes(self) -> int:
        """The bytes of all chunks: `nbytes`, and what the last slices have behind the end."""
        return -(-self.nbytes // self.chunk_bytes) * self.chunk_bytes if self.nbytes else 0

    def chunks(self) -> Iterator[tuple[int, int]]:
        """Yields the start and the end of each chunk."""
        for start in range(0, self.padded_bytes, self.chunk_bytes or 1):
            yield start, start + self.chunk_bytes

    def own(self, rank: int) -> Iterator[tuple[int, int]]:
        """Yields start and end of the slice of each chunk that is process `rank`'s, as far as it is in the buffer."""
        size = self.chunk_bytes // self.count
        for chunk, _ in self.chunks():
            start = min(chunk + rank * size, self.nbytes)
            yield start, min(start + size, self.nbytes)

    def elements(self, tensor: UnitTensor, rank: int) -> list[range]:
        """Returns the ranges of `tensor`, in elements of its flat form, that lie in the slices of process `rank`.

        The tensor is contiguous in its unit.
        """
        size = tensor.dtype.itemsize
        found = []
        for start, end in self.own(rank):
            first, last = max(start, tensor.offset), min(end, tensor.offset + tensor.nbytes)
            if first < last:
                found.append(range((first - tensor.offset) // size, (last - tensor.offset) // size))
        return found


def slices_of(unit: OffloadUnit, count: int) -> Slices:
    """Returns the slices of a unit among `count` processes."""
    return Slices(unit.nbytes, count)


def cut_for_sharers(parts: CutModel) -> CutModel:
    """Returns `parts` for processes that share the homes of the units: with slices in mind, and without buffers.

    A forward may change a buffer, and each process has its own, which stays on the device. Tensors begin where slices
    may (SHARED_ALIGNMENT_BYTES).
    """
    resident = list(parts.resident)
    for unit in parts.units:
        resident += [(tensor.host, tensor.attributes) for tensor in unit.tensors if tensor.is_buffer]
        kept, unit.tensors = [tensor for tensor in unit.tensors if not tensor.is_buffer], []
        unit.alignment = SHARED_ALIGNMENT_BYTES
        for tensor in kept:
            tensor.offset = unit.nbytes
            unit.tensors.append(tensor)
    units = [unit for unit in parts.units if unit.tensors]
    for index, unit in enumerate(units):
        unit.index = index
    read = [(window.module, [(unit, t) for unit, t in window.read if not t.is_buffer]) for window in parts.windows]
    return CutModel(parts.model, units, [Window(module, tuple(each)) for module, each in read if each], resident)


def check_divisible(unit: OffloadUnit) -> None:
    """Raises ValueError for a unit that processes cannot share.

    That is one in files, or with a parameter that trains and cannot be updated slice by slice.
    """
    if unit.is_fixed:
        raise ValueError(
            f"{unit} has its home in a file (source=mapped), which processes do not share: use source=memory, or"
            f" {OWN_HOMES}"
        )
    for tensor in unit.trained:
        if not tensor.host.is_contiguous():
            raise ValueError(
                f"{tensor.name} has strides {tuple(tensor.host.stride())}, so processes that share it cannot update"
                f" slices of it: make it contiguous, or {OWN_HOMES}"
            )


def updated_elements(units: Sequence[OffloadUnit], count: int) -> tuple[tuple[tuple[int, ...], ...], ...]:
    """Returns for each of `count` processes, and for each unit, the elements of the ranges of it that it updates."""
    return tuple(
        tuple(
            tuple(len(part) for tensor in unit.trained for part in slices_of(unit, count).elements(tensor, rank))
            for unit in units
        )
        for rank in range(count)
    )
