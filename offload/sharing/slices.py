"""Divides the bytes of a unit among the processes that share its home, into equal slices.

A process copies in its slice, and all gather the others' (ZeRO-3 gathers whole parameters so, Rajbhandari et al. 2020).
The slice that a process copies in is the one that it updates: so its own updates are the only ones that its copies have
to wait for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.sharing.sharers import OWN_HOMES
from offload.weights.units.partition import CutModel, Window
from offload.weights.units.unit import OffloadUnit, UnitTensor

# The alignment of tensors that processes share, and of their slices: 256 numbers, a block of states in 8 bits.
SHARED_ALIGNMENT_BYTES = 1024


@dataclass(frozen=True)
class Slices:
    """The slices of a flat buffer of `nbytes`, divided among `count` processes.

    Each begins at a multiple of SHARED_ALIGNMENT_BYTES. The last ones may lie partly or wholly behind the end.
    """

    nbytes: int
    count: int

    @property
    def padded_bytes(self) -> int:
        """The bytes of all slices: `nbytes`, and what the last ones have behind the end."""
        step = self.count * SHARED_ALIGNMENT_BYTES
        return -(-self.nbytes // step) * step

    def own(self, rank: int) -> tuple[int, int]:
        """Returns start and end of the slice of process `rank`, as far as it is in the buffer."""
        size = self.padded_bytes // self.count
        return min(rank * size, self.nbytes), min((rank + 1) * size, self.nbytes)

    def elements(self, tensor: UnitTensor, rank: int) -> list[range]:
        """Returns the ranges of `tensor`, in elements of its flat form, in the slice of process `rank`: one or none.

        The tensor is contiguous in its unit.
        """
        start, end = self.own(rank)
        first, last = max(start, tensor.offset), min(end, tensor.offset + tensor.nbytes)
        size = tensor.dtype.itemsize
        return [range((first - tensor.offset) // size, (last - tensor.offset) // size)] if first < last else []


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
