"""Homes of weights in files: frozen tensors whose values are read from safetensors files, and not kept in memory.

Between steps the data of such a parameter is a view of its mapped file, which takes no memory until somebody looks at
it. A copy to the device reads the file anew, through the ring of `file_ring`. A parameter that is written to, or given
other data, is in memory from then on: see `UnitTensor.reads_file` and `OffloadUnit.gather`.

A unit may have tensors of both kinds. Those in memory come first in its flat buffer, in one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import torch

from offload.errors import KnobError
from offload.files.file_ring import FileRing, ReadPlan
from offload.files.mapped_files import FileSpan, MappedFile, shows_writes
from offload.memory.device_slots import DeviceSlot
from offload.memory.host_bytes import free_host_bytes
from offload.memory.host_memory import HostArena, aligned
from offload.streams.transfer import Transfer
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor

# Units that wait in the ring, where nothing else is asked for: one is copied while others are read.
RING_BLOCKS = 4

Spans = Mapping[torch.Tensor, Sequence[FileSpan]]


def put_in_files(units: Iterable[OffloadUnit], spans: Spans) -> None:
    """Gives the frozen parameters of `units` their places in files, a span for each plain tensor of a parameter.

    Tensors that train, buffers, and those whose bytes are not in the files as they are in memory stay in memory.
    """
    for unit in units:
        for tensor in unit.tensors:
            found = spans.get(tensor.host)
            if found is not None and _fits(tensor, found):
                tensor.spans = tuple(found)
        unit.tensors.sort(key=lambda tensor: tensor.spans is not None)
        end = 0
        for tensor in unit.tensors:
            tensor.offset, end = end, end + aligned(tensor.nbytes)


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


def plan_of(unit: OffloadUnit) -> ReadPlan:
    """Returns the reads that bring the tensors of `unit` that are in files into a block."""
    spans = [span for tensor in unit.tensors if tensor.reads_file for span in tensor.spans]
    return ReadPlan(unit.name, spans)


def ring_size(units: Iterable[OffloadUnit], ring_bytes: int | None) -> tuple[int, int]:
    """Returns the bytes of a block of the ring, which holds the largest unit, and the number of blocks.

    `ring_bytes` is the room for all, None for RING_BLOCKS. Raises KnobError where no unit is in files, and where one
    has no room.
    """
    plans = [plan_of(unit) for unit in units]
    plans = [plan for plan in plans if plan.nbytes]
    if not plans:
        raise KnobError("source", "mapped", "no weight that streams lies in the files as it is in memory: take memory")
    largest = max(plans, key=lambda plan: plan.nbytes)
    count = RING_BLOCKS if ring_bytes is None else ring_bytes // largest.nbytes
    if not count:
        raise KnobError("ring_bytes", ring_bytes, f"must be at least {largest.nbytes}, the bytes of {largest}, or null")
    return largest.nbytes, min(count, len(plans))


class NoFiles:
    """The answers where every home is in memory."""

    wait_ms = 0.0
    read_bytes = 0
    # The number of units that are read ahead.
    ahead = 0
    # By path; None where nothing is opened, as in a dry run.
    files: dict[Path, MappedFile] | None = None

    def check(self) -> None:
        """Raises ChangedFileError where a file is not what it was."""

    def is_ready(self, unit: OffloadUnit) -> bool:
        """Tells whether `copy_in` would not wait for a file."""
        return True

    def expect(self, units: Iterable[OffloadUnit]) -> None:
        """Reads ahead what `units`, which are copied in next, have in files."""

    def copy_in(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Copies what `unit` has in files to `slot`, and records `slot.ready` behind it."""

    def close(self) -> None:
        """Ends all reads."""


NO_FILES = NoFiles()


class FileHomes(NoFiles):
    """Reads the units of one attached model from their files.

    Raises OSError where a file cannot be opened, and ChangedFileError where it ends before its weights do.
    """

    def __init__(
        self,
        units: Sequence[OffloadUnit],
        arena: HostArena,
        transfer: Transfer,
        *,
        ring_bytes: int | None,
        threads: int,
    ):
        self._transfer = transfer
        self._streams = transfer.streams
        self._plans: dict[OffloadUnit, tuple[tuple[UnitTensor, ...], ReadPlan]] = {}
        block_bytes, count = ring_size(units, ring_bytes)
        tensors = [tensor for unit in units for tensor in unit.tensors if tensor.spans]
        if self._streams.device.type != "meta":
            if not shows_writes():
                problem = "needs /proc/self/pagemap of Linux, which shows writes to mapped weights: take memory"
                raise KnobError("source", "mapped", problem)
            paths = dict.fromkeys(span.path for tensor in tensors for span in tensor.spans)
            self.files = {path: MappedFile(path) for path in paths}
        free, in_files = free_host_bytes(), sum(tensor.nbytes for tensor in tensors)
        self._ring = FileRing(
            self.files or {},
            arena,
            self._streams,
            block_bytes=block_bytes,
            count=count,
            threads=threads,
            # Where the weights do not fit in memory, the page cache would lose each before it is read again.
            direct=free is not None and in_files > free,
            poison=not self._streams.asynchronous,
        )
        self.ahead = count

    @property
    def wait_ms(self) -> float:
        return self._ring.wait_ms

    @property
    def read_bytes(self) -> int:
        return self._ring.read_bytes

    def check(self) -> None:
        for file in (self.files or {}).values():
            file.check()

    def is_ready(self, unit: OffloadUnit) -> bool:
        plan = self._plan(unit)
        return not plan.parts or self._ring.is_ready(plan)

    def expect(self, units: Iterable[OffloadUnit]) -> None:
        self._ring.expect(plan for plan in map(self._plan, units) if plan.parts)

    def copy_in(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        plan = self._plan(unit)
        if not plan.parts:
            return
        fill = self._ring.take(plan)
        self._ring.declare_reads(fill, f"onload of {unit}")
        self._streams.writes(self._streams.h2d, slot, f"onload of {unit} from files")
        places = iter(plan.places)
        for tensor in unit.tensors:
            if not tensor.reads_file:
                continue
            for piece, place in zip(tensor.layout.pieces, places, strict=False):
                start = tensor.offset + piece.offset
                target = slot.bytes[start : start + piece.nbytes]
                source = fill.memory.bytes[place : place + piece.nbytes]
                self._transfer.copy_in(target, source, done=slot.ready, what=tensor.name)
        self._ring.give_back(fill)

    def close(self) -> None:
        self._ring.close()

    def _plan(self, unit: OffloadUnit) -> ReadPlan:
        """Returns the reads of `unit`; new ones where a tensor of it has left its file."""
        tensors = tuple(tensor for tensor in unit.tensors if tensor.reads_file)
        known = self._plans.get(unit)
        if known is None or known[0] != tensors:
            known = self._plans[unit] = tensors, plan_of(unit)
        return known[1]
