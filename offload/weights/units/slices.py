"""Divides the bytes of a unit among the processes that share its home: into chunks, and each chunk into equal slices.

A process copies in its slice of each chunk, and the chunk is gathered while the slice of the next is being copied
(ZeRO-3 gathers whole parameters so, Rajbhandari et al. 2020). The slices that a process copies in are those that it
updates: so its own updates are the only ones that its copies have to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from offload.sharing.sharers import OWN_HOMES
from offload.weights.units.unit import SHARED_ALIGNMENT_BYTES, OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor

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


def check_divisible(unit: OffloadUnit) -> None:
    """Raises ValueError for a tensor of the unit that processes cannot share.

    That is a parameter that trains and cannot be updated slice by slice, or one whose home is in a file.
    """
    if mapped := [tensor.name for tensor in unit.tensors if tensor.spans is not None]:
        raise ValueError(
            f"{mapped[0]} has its home in a file (source=mapped), which processes do not share: use source=memory, or"
            f" {OWN_HOMES}"
        )
    for tensor in unit.trained:
        if not tensor.host.is_contiguous():
            raise ValueError(
                f"{tensor.name} has strides {tuple(tensor.host.stride())}, so processes that share it cannot update"
                f" slices of it: make it contiguous, or {OWN_HOMES}"
            )
