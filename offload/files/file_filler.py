"""Units whose weights stay in safetensors files, from which threads read them ahead of their copies to the device.

Between steps the data of such a parameter is a view of its mapped file, which takes no memory until somebody looks at
it. A copy to the device reads the file anew, through the ring of `file_ring`. These weights are frozen for good: what
trains, or is changed, has to be in memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from offload.files.file_ring import FileRing, ReadPlan
from offload.files.mapped_files import FileSpan, MappedFile
from offload.knobs import KnobError
from offload.memory.device_slots import DeviceSlot
from offload.memory.host_memory import HostArena, HostBlock
from offload.memory.limits import free_host_bytes
from offload.streams.transfer import Counters, Transfer
from offload.weights.prefetching.slot_contents import Filler, Forecast
from offload.weights.units.partition import CutModel
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Units that wait in the ring: one is copied while others are read.
RING_BLOCKS = 4
IN_MEMORY = "weights that stay in their files (source=mapped) are frozen for good: take source=memory"

Spans = Mapping[torch.Tensor, Sequence[FileSpan]]
"""where the values of parameters are in files: a span for each plain tensor of a parameter"""


def leave_in_files(units: Iterable[OffloadUnit], spans: Spans) -> None:
    """Marks the units that are read from files: every tensor is frozen, no buffer, and its bytes are in a file.

    Raises KnobError where there are none.
    """
    # Those that a mode with smaller units would read from files.
    with_buffers = False
    for unit in units:
        others = [tensor for tensor in unit.tensors if not _fits(tensor, spans.get(tensor.host, ()))]
        unit.is_fixed = not others
        with_buffers |= all(tensor.is_buffer for tensor in others)
    if not any(unit.is_fixed for unit in units):
        problem = (
            "all that streams are units with buffers, which are in no file: take memory, or the mode bounce_linear,"
            " whose units are single layers"
            if with_buffers
            else "no unit that streams lies in the files as a whole, frozen and as it is in memory: take memory, or"
            " trained=device if some of its weights train"
        )
        raise KnobError("source", "mapped", problem)


def _fits(tensor: UnitTensor, spans: Sequence[FileSpan]) -> bool:
    pieces = tensor.layout.pieces
    return (
        not tensor.is_buffer
        and not tensor.trains
        and [piece.nbytes for piece in pieces] == [span.nbytes for span in spans]
        and all(piece.is_contiguous for piece in pieces)
        # A view of them would begin between two elements.
        and all(span.offset % piece.dtype.itemsize == 0 for piece, span in zip(pieces, spans, strict=True))
    )


def plans_of(units: Iterable[OffloadUnit], spans: Spans) -> dict[OffloadUnit, ReadPlan]:
    """Returns, for each unit that is in files, the reads that bring it into a block."""
    return {
        unit: ReadPlan(unit.name, [span for tensor in unit.tensors for span in spans[tensor.host]])
        for unit in units
        if unit.is_fixed
    }


def ring_bytes(units: Iterable[OffloadUnit], spans: Spans) -> int:
    """Returns the bytes of host memory through which `units` are read."""
    return math.prod(_ring_size(plans_of(units, spans).values()))


def _ring_size(plans: Iterable[ReadPlan]) -> tuple[int, int]:
    """Returns the bytes of a block of the ring, which holds the largest unit, and the number of blocks."""
    sizes = [plan.nbytes for plan in plans]
    return max(sizes), min(RING_BLOCKS, len(sizes))


class FileFiller(Filler):
    """Reads the units that `leave_in_files` has marked from the files of `spans`; the others are in memory.

    Raises OSError where a file cannot be opened, and ChangedFileError where it ends before its weights do.
    """

    follows_uses = True

    def __init__(self, cut: CutModel, transfer: Transfer, arena: HostArena, gradient_bytes: int, *, spans: Spans):
        super().__init__(cut, transfer, arena, gradient_bytes)
        self._units = cut.units
        self._plans = plans_of(cut.units, spans)
        self._spans = {tensor: spans[tensor.host] for unit in self._plans for tensor in unit.tensors}
        self._taken: dict[OffloadUnit, list[tuple]] = {}
        # None in a dry run, which opens nothing.
        self._files: dict[Path, MappedFile] | None = None
        if self._streams.device.type != "meta":
            paths = dict.fromkeys(span.path for found in self._spans.values() for span in found)
            self._files = {path: MappedFile(path) for path in paths}
        free = free_host_bytes()
        block_bytes, count = _ring_size(self._plans.values())
        # If the page cache has no room for all, it would lose each before it is read again.
        direct = free is not None and cut.fixed_bytes > free
        self._ring = FileRing(
            self._files or {}, arena, self._streams, block_bytes=block_bytes, count=count, direct=direct
        )

    def bring_home(self, unit: OffloadUnit) -> None:
        if not unit.is_fixed:
            super().bring_home(unit)
            return
        unit.weights = self.homes.allocate(0, f"weights of {unit}")
        for tensor in unit.tensors:
            tensor.lie_in([*map(self._view, self._spans[tensor])])
        self._taken[unit] = unit.weights_now()

    def close(self) -> None:
        self._ring.close()
        super().close()

    def counters(self) -> Counters:
        return super().counters() + Counters(file_bytes=self._ring.read_bytes, file_wait_ms=self._ring.wait_ms)

    def check_changes(self, unit: OffloadUnit) -> None:
        if not unit.is_fixed:
            return
        unit.notice_writes()
        if unit.trained:
            raise RuntimeError(f"{unit.trained[0].name} trains now: {IN_MEMORY}")
        replaced = any(held.tensor is not tensor.host for tensor in unit.tensors for held in tensor.attributes)
        if replaced or unit.weights_now() != self._taken[unit]:
            raise RuntimeError(f"a weight of {unit} was changed or replaced: {IN_MEMORY}")

    def check_written(self, unit: OffloadUnit, tensors: Sequence[UnitTensor]) -> None:
        if unit.is_fixed:
            raise RuntimeError(f"{tensors[0].name} was changed in a forward: {IN_MEMORY}")

    def begin(self, in_step: bool) -> None:
        for file in (self._files or {}).values():
            file.check()

    def is_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> bool:
        is_read = unit not in self._plans or self._ring.is_ready(self._plans[unit])
        return is_read and super().is_ready(unit, slot)

    def look_ahead(self, forecast: Forecast) -> None:
        """Reads ahead what the next copies in need, those of the next step too."""
        count = len(self._ring)
        # Beyond what is in the slots, whose units are used without a copy.
        far = count + 3 * forecast.slots
        coming = coming_in(forecast.upcoming(far), forecast.held, forecast.slots, count)
        coming += coming_in(forecast.next_step[:far], (), forecast.slots, count - len(coming))
        units = (self._units[index] for index in coming)
        self._ring.expect(self._plans[unit] for unit in units if unit in self._plans)

    def fill(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        if unit not in self._plans:
            super().fill(unit, slot)
            return
        self.check_changes(unit)
        plan = self._plans[unit]
        fill = self._ring.take(plan)
        self._ring.declare_reads(fill, f"onload of {unit}")
        pieces = [
            (tensor.offset + piece.offset, piece.nbytes) for tensor in unit.tensors for piece in tensor.layout.pieces
        ]
        for (start, nbytes), place in zip(pieces, plan.places, strict=True):
            source = fill.memory.bytes[place : place + nbytes]
            self._transfer.copy_in(slot.bytes[start : start + nbytes], source, done=slot.ready, what=unit.name)
        self._ring.give_back(fill)

    def _view(self, span: FileSpan) -> torch.Tensor:
        if self._files is None:
            return HostBlock(span.nbytes, str(span.path), is_meta=True).bytes
        return self._files[span.path].view(span)


def coming_in(uses: Sequence[int], held: Iterable[int], slots: int, count: int) -> list[int]:
    """Returns the first `count` units that `uses`, from the next use on, copy into `slots` slots.

    `held` are the units that are in slots now. A unit in a slot is not copied; where no slot is free, the one whose
    next use is farthest makes way (Belady 1966), as in `Prefetcher`.
    """
    held, found = list(held), []
    for place, unit in enumerate(uses):
        if len(found) == count:
            break
        if unit in held:
            continue
        found.append(unit)
        if len(held) >= slots:
            held.remove(max(held, key=lambda other: _next_use(other, uses, place)))
        held.append(unit)
    return found


def _next_use(unit: int, uses: Sequence[int], place: int) -> float:
    return next((later for later in range(place + 1, len(uses)) if uses[later] == unit), math.inf)
