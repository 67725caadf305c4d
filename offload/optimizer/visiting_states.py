"""Units whose optimizer states live on the host and visit the device to be updated, while the host updates others.

Where all gradients must be known before the first update, the bus is idle while the host updates, and the device waits.
States that travel through it are updated as fast as it copies them, which is about as fast as the host updates the
rest. The idea of sharing updates so is that of Deep Optimizer States (Maurya et al. 2024).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from offload.optimizer.adamw import Claim, HostAdamW
from offload.optimizer.kernels import FusedUpdate, Operands
from offload.optimizer.state_dicts import MOMENTS
from offload.runtime.device_slots import DeviceSlot
from offload.runtime.host_memory import HostArena, aligned
from offload.runtime.registry import Event
from offload.runtime.transfer import Transfer
from offload.weights.units import OffloadUnit, UnitTensor

# Elements that visit at a time, and how many such pieces are under way: in, in work, out.
PIECE = 1 << 24
SLOTS = 3


@dataclass(eq=False)
class _Piece:
    """Where a part of a parameter's states lives: what copies in and out are ordered by."""

    name: str

    def __str__(self) -> str:
        return self.name


class VisitingStates:
    """About `share` of `units`, by parameters, spread evenly; their states by `optimizer` get page-locked homes.

    Copies in have a stream of their own, because what waits for weights does not wait for them. Updates run on the d2h
    stream, before the copies out; `unit.updated` ends those. Holds `SLOTS` pieces of the device's memory. Raises
    MemoryError, before anything is allocated, where the host has no room for the states.
    """

    def __init__(
        self,
        units: Iterable[OffloadUnit],
        optimizer: HostAdamW,
        transfer: Transfer,
        arena: HostArena,
        share: float,
    ):
        units = list(units)
        sizes = [sum(tensor.host.numel() for tensor in unit.trained) for unit in units]
        self.units = {units[index] for index in evenly(sizes, share)}
        self._optimizer = optimizer
        self._transfer = transfer
        self._streams = transfer.streams
        self._pieces: dict[tuple[UnitTensor, int], _Piece] = {}
        self._turn = 0
        arena.require(sum(_nbytes(self._layout(unit)) for unit in self.units))
        for unit in self.units:
            self._give_home(unit, arena)
        count = SLOTS if self.units else 0
        # Kernels already queued may use this memory still; they are over before the first update, as steps end so.
        self._slots = [DeviceSlot(index, self._slot_bytes(), self._streams) for index in range(count)]

    def offer(
        self, unit: OffloadUnit, tensors: Iterable[UnitTensor], scale: float = 1.0, after: Sequence[Event] = ()
    ) -> None:
        """Queues the update of those of `tensors` that have a gradient in this step, behind `after`; `unit.updated`
        ends it."""
        by_parameter = {tensor.host: tensor for tensor in tensors}
        claims = self._optimizer.claim(by_parameter)
        if not claims:
            return
        for event in after:
            self._streams.d2h.wait_event(event)
        for claim in claims:
            tensor = by_parameter[claim.parameter]
            if tensor.landed is not None:
                self._streams.visits.wait_event(tensor.landed)
            self._update(unit, tensor, claim, scale)
        unit.updated = self._streams.event()
        unit.updated.record(self._streams.d2h)

    def leave(self, units: Iterable[OffloadUnit]) -> None:
        """The states of `units` do not visit any more: somebody else updates them."""
        self.units.difference_update(units)

    def _update(self, unit: OffloadUnit, tensor: UnitTensor, claim: Claim, scale: float) -> None:
        state = self._optimizer.begin_update(claim)
        count = state["step"].item()
        for index, home in enumerate(self._optimizer.operands(claim).split(PIECE)):
            piece = self._pieces.setdefault((tensor, index), _Piece(f"states {index} of {tensor.name}"))
            slot = self._slots[self._turn]
            self._turn = (self._turn + 1) % SLOTS
            visiting = _in_slot(slot, home)
            self._copy_in(tensor, piece, slot, home, visiting)
            with self._streams.on(self._streams.d2h):
                step = torch.full((), count, dtype=torch.float32, device=self._streams.device)
                FusedUpdate()(visiting, step, claim.settings, scale)
            self._streams.writes(self._streams.d2h, unit.weights, "copy out")
            self._copy_out(tensor, piece, slot, home, visiting)

    def _copy_in(self, tensor: UnitTensor, piece: _Piece, slot: DeviceSlot, home: Operands, there: Operands) -> None:
        streams, visits = self._streams, self._streams.visits
        visits.wait_event(slot.free)
        streams.reads(visits, tensor, "visit")
        streams.reads(visits, piece, "visit")
        streams.writes(visits, slot, "visit")
        for name in ("gradient", "master", *MOMENTS):
            what = f"{name} of {tensor.name}"
            self._transfer.copy_in(getattr(there, name), getattr(home, name), slot.ready, what, visits)
        streams.d2h.wait_event(slot.ready)
        streams.writes(streams.d2h, slot, "update")

    def _copy_out(self, tensor: UnitTensor, piece: _Piece, slot: DeviceSlot, home: Operands, there: Operands) -> None:
        self._streams.writes(self._streams.d2h, piece, "copy out")
        for name in ("master", *MOMENTS, *([] if home.in_place else ["weight"])):
            self._transfer.copy_out(getattr(home, name), getattr(there, name), slot.free, f"{name} of {tensor.name}")

    def _give_home(self, unit: OffloadUnit, arena: HostArena) -> None:
        layout = self._layout(unit)
        home = arena.allocate(_nbytes(layout), f"optimizer states of {unit}")
        used = 0
        for parameter, name, dtype in layout:
            memory = home.bytes[used : used + parameter.numel() * dtype.itemsize].view(dtype)
            self._optimizer.keep_in(parameter, name, memory)
            used += aligned(memory.nbytes)

    def _layout(self, unit: OffloadUnit) -> list[tuple[torch.Tensor, str, torch.dtype]]:
        """Parameter, name and dtype of every state of the unit."""
        parameters = [tensor.host for tensor in unit.trained]
        return [(p, name, dtype) for p in parameters for name, dtype in self._optimizer.state_dtypes(p).items()]

    def _slot_bytes(self) -> int:
        """What the largest piece of any parameter takes: its states, gradient and weight."""
        largest = 0
        for unit in self.units:
            for parameter in (tensor.host for tensor in unit.trained):
                dtypes = [*self._optimizer.state_dtypes(parameter).values(), parameter.dtype, parameter.dtype]
                count = min(parameter.numel(), PIECE)
                largest = max(largest, sum(aligned(count * dtype.itemsize) for dtype in dtypes))
        return largest


def evenly(sizes: Sequence[int], share: float) -> list[int]:
    """The indices of units that have at most `share` of all parameters, spread over all; the first only if all are."""
    chosen, taken, seen = [], 0, 0
    for index, size in enumerate(sizes):
        seen += size
        if size and taken + size <= share * seen:
            chosen.append(index)
            taken += size
    return chosen


def _in_slot(slot: DeviceSlot, home: Operands) -> Operands:
    """Room in the slot for what `home` has: uninitialised tensors of the same dtypes and lengths."""
    room, used = {}, 0
    for name in ("gradient", "master", *MOMENTS, "weight"):
        tensor = getattr(home, name)
        room[name] = slot.bytes[used : used + tensor.nbytes].view(tensor.dtype)
        used += aligned(tensor.nbytes)
    if home.in_place:
        room["weight"] = room["master"]
    return Operands(**room)


def _nbytes(layout: Iterable[tuple[torch.Tensor, str, torch.dtype]]) -> int:
    return sum(aligned(parameter.numel() * dtype.itemsize) for parameter, _, dtype in layout)
