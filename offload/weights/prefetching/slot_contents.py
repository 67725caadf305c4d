"""Knows which unit is in which device slot: copies units in, writes changed buffers home, empties slots.

[Note: the life of a slot]

- Free. `content` is None, and the h2d stream already waits for every stream that has read the slot.
- Filling. `Filler.fill` queues the copy of a unit on the h2d stream and records `ready` behind it; `content` is the
  unit.
- Read. The first `let_compute_read` after that makes compute wait for `ready` and adds it to `readers`. `write_home`
  adds the d2h stream, which copies changed buffers out of the slot. The slot keeps its unit while a window is open on
  the unit, while the unit is among those fetched last in backward, and inside `Prefetcher.retain_recent`.
- Read so far. `mark_last_use` records `free` on compute: what is queued later does not read the slot, until
  the next read.
- Released. `evict` records `free` on the other readers, on compute if the unit was fetched since, and makes the h2d
  stream wait for it, so that the next copy into the slot comes after all that reads it: the slot is free. Recorded only
  now, `free` would come after the work of other units that compute was given meanwhile, and the copy would wait for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot, DeviceSlots
from offload.memory.host_memory import HostArena
from offload.streams.registry import Event
from offload.streams.transfer import Counters, Transfer
from offload.weights.gradients.landing import GradientLanding
from offload.weights.gradients.seams import NO_UPDATES, Updates
from offload.weights.units.partition import CutModel
from offload.weights.units.unit import OffloadUnit, UnitTensor


class Forecast(NamedTuple):
    """The units that will be used, by index: the next ones, those of the next step, and those that are in slots now."""

    upcoming: Callable[[int], Sequence[int]]
    next_step: Sequence[int]
    held: Sequence[int]
    slots: int


class Filler:
    """The homes of an attached model's units, in the arena `homes`, and the copies from there into slots.

    `slot_bytes` are those that a slot needs. `updates` is asked before a unit is copied in.
    """

    follows_uses = False
    """True: `note_use` is called before each fetch of a step, and `look_ahead` after each fetch"""
    has_gradient_homes = True
    """False: gradients have no memory of their own at home, unless one needs it"""
    updaters = 1
    """the number of processes that divide the update of a unit"""

    def __init__(self, cut: CutModel, transfer: Transfer, arena: HostArena, gradient_bytes: int):
        """`gradient_bytes` are those of the gradients on the host.

        Raises MemoryError, before anything is allocated, where the host has no room.
        """
        self.updates: Updates = NO_UPDATES
        self._arena = arena
        self._transfer, self._streams = transfer, transfer.streams
        self.homes, self.slot_bytes = self._make_homes(cut, gradient_bytes)

    def _make_homes(self, cut: CutModel, gradient_bytes: int) -> tuple[HostArena, int]:
        self._arena.require(cut.unit_bytes - cut.fixed_bytes + gradient_bytes)
        return self._arena, cut.largest_unit_bytes

    def allocate_slot(self, nbytes: int) -> torch.Tensor:
        """Returns device memory, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._streams.device)

    def bring_home(self, unit: OffloadUnit) -> None:
        """Gives the unit its home, with its values; `unit.put_back` takes it back."""
        unit.bring_home(self.homes)

    def join(self, gradients: GradientLanding, on_device: Sequence[nn.Parameter]) -> None:
        """Ends the attachment. `on_device` are the parameters that stay on the device and train."""

    def close(self) -> None:
        """Gives back everything but the homes' memory, which tensors still view. The device is idle."""
        self.homes.close()

    def counters(self) -> Counters:
        """Returns the host memory of the homes, and what else the filler counts."""
        return Counters(host_pinned_bytes=self._arena.pinned_bytes, host_pageable_bytes=self._arena.pageable_bytes)

    # Of steps and of forwards outside of them.

    def check_changes(self, unit: OffloadUnit) -> None:
        """Raises RuntimeError where the user has changed what may not be changed, since the last step."""

    def begin(self, in_step: bool) -> None:
        """Begins a step, or forwards outside of steps."""

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        """Takes the use of a unit in a step."""

    def look_ahead(self, forecast: Forecast) -> None:
        """Prepares the units that will be copied in next."""

    def is_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> bool:
        """Tells whether `fill` may come now, ahead of the unit's use, without a wait of the host; `fill` follows."""
        if self.updates.is_pending(unit):
            return False
        self.updates.before_onload(unit)
        return True

    def await_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Blocks the host until `fill` may come, for a use of the unit now."""
        self.updates.before_onload(unit)

    def fill(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Queues the copies of a unit into a slot, which is free as the h2d stream sees it; `slot.ready` ends them."""
        block = unit.weights.bytes
        self._transfer.copy_in(slot.bytes[: block.numel()], block, done=slot.ready, what=unit.name)

    def before_reuse(self, slot: DeviceSlot) -> None:
        """Makes the h2d stream wait for other streams that have filled the slot."""

    def check_written(self, unit: OffloadUnit, tensors: Sequence[UnitTensor]) -> None:
        """Raises RuntimeError where tensors that a forward has changed cannot be copied home."""

    def end_uses(self) -> None:
        """Ends the uses of a step, all of which have been queued."""

    def end_step(self) -> None:
        """Ends a step, also after an error."""

    def abandon_step(self) -> None:
        """Called in a step that fails, before it ends."""


class SlotContents:
    """The units in a fixed pool of slots.

    Two orders hold throughout: compute reads a slot after the copy that fills it, and a copy fills a slot after all
    streams that read it before.
    """

    def __init__(self, slots: DeviceSlots, transfer: Transfer, poison: bool, filler: Filler):
        """`poison` fills freed slots with NaN, so that a stale read shows in the result; it costs device bandwidth.

        `filler` brings units into slots.
        """
        self.slot_of: dict[OffloadUnit, DeviceSlot] = {}
        """the slot of each unit that has one"""
        self.unawaited: dict[OffloadUnit, Event] = {}
        """the end of the last copy in of each unit for which no stream has waited yet"""
        self._all = slots.all
        self._transfer = transfer
        self._streams = transfer.streams
        self._poison = poison
        self._filler = filler
        # Units that were copied in since the host last might change the weights.
        self._copied: set[OffloadUnit] = set()
        for slot in slots:
            # The allocator may hand out memory that kernels already queued still use.
            slot.readers = [self._streams.compute]
            self._release(slot)

    @property
    def slots(self) -> int:
        """The number of slots."""
        return len(self._all)

    def free_slot(self) -> DeviceSlot | None:
        """Returns a slot that has no unit, if there is one."""
        if len(self.slot_of) == self.slots:
            return None
        return next(slot for slot in self._all if slot.content is None)

    def fill(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Copies a unit into a free slot."""
        # A write back of this unit is over by now as h2d sees it: its slot was released behind it.
        self._streams.reads(self._streams.h2d, unit.weights, f"onload of {unit.name}")
        self._streams.writes(self._streams.h2d, slot, f"onload of {unit.name}")
        self._filler.fill(unit, slot)
        for tensor in unit.strays():
            for view, given in zip(tensor.views_of(slot.bytes), tensor.parts, strict=True):
                self._transfer.copy_in(view, given.data, done=slot.ready, what=tensor.name)
        slot.source = unit.weights_now()
        self.unawaited[unit] = slot.ready
        self._copied.add(unit)
        slot.content = unit
        self.slot_of[unit] = slot

    def let_compute_read(self, unit: OffloadUnit) -> None:
        """Makes the current compute stream wait for what is being copied into and out of the slot of `unit`."""
        slot, stream = self.slot_of[unit], self._streams.compute
        slot.read_by = None
        if stream not in slot.readers:
            self._transfer.await_on(stream, slot.ready)
            slot.readers.append(stream)
        if self._streams.d2h in slot.readers:
            # Buffers that are being copied home may be updated by this use.
            self._transfer.await_on(stream, unit.written)
        self._streams.reads(stream, slot, f"use of {unit.name}")
        self.unawaited.pop(unit, None)

    def mark_last_use(self, unit: OffloadUnit) -> None:
        """Notes that nothing which compute is given from now on reads the slot of `unit`, until the next read."""
        slot, stream = self.slot_of[unit], self._streams.compute
        if stream in slot.readers:
            self._streams.reads(stream, slot, f"use of {unit.name}")
            slot.free.record(stream)
            slot.read_by = stream

    def evict(self, unit: OffloadUnit) -> DeviceSlot:
        """Takes a unit out of its slot, and returns the slot: it is free."""
        slot = self.slot_of.pop(unit)
        slot.content = None
        self._release(slot)
        return slot

    def evict_all(self) -> None:
        """Empties every slot on which no window is open."""
        for unit in list(self.slot_of):
            if not unit.open_windows:
                self.evict(unit)

    def write_home(self, unit: OffloadUnit, changed: Mapping[UnitTensor, list[torch.Tensor]]) -> None:
        """Copies tensors of `unit` that compute changed back to the host block; `unit.written` ends it.

        `changed` has their parts on the device. Raises RuntimeError as `Filler.check_written` does.
        """
        streams, slot = self._streams, self.slot_of[unit]
        self._filler.check_written(unit, [*changed])
        streams.writes(streams.compute, slot, f"update of {unit.name}")
        self._transfer.after_compute(streams.d2h)
        streams.reads(streams.d2h, slot, f"write back of {unit.name}")
        streams.writes(streams.d2h, unit.weights, f"write back of {unit.name}")
        unit.written = streams.event()
        for tensor, parts in changed.items():
            for home, part in zip(unit.home_of(tensor), parts, strict=True):
                self._transfer.copy_out(home, part, done=unit.written, what=tensor.name)
        if streams.d2h not in slot.readers:
            slot.readers.append(streams.d2h)

    def release_for_host_writes(self) -> None:
        """Empties every slot, but for units with open windows, and blocks the host until it may change the weights."""
        self._empty_slots()
        for unit in [unit for unit in self._copied if not unit.open_windows]:
            if unit.written is not None:
                unit.written.synchronize()
            self._streams.writes(None, unit.weights, "the host's next change")
            self._copied.remove(unit)
        self.unawaited.clear()

    def end_step(self) -> None:
        """Empties every slot, and blocks the host until no copy in reads a home; writes home are the caller's."""
        self._empty_slots()
        self._copied.clear()
        self.unawaited.clear()

    def unawaited_copy(self, unit: OffloadUnit) -> list[Event]:
        """Returns the end of the last copy in of `unit`, if no stream has waited for it yet.

        The unit was then fetched ahead and has not been used, so the copy may still be reading the home.
        """
        return [self.unawaited[unit]] if unit in self.unawaited else []

    def _empty_slots(self) -> None:
        copied = self._streams.event()
        # Before slots are released, for which h2d waits for compute.
        copied.record(self._streams.h2d)
        self.evict_all()
        copied.synchronize()

    def _release(self, slot: DeviceSlot) -> None:
        h2d = self._streams.h2d
        self._filler.before_reuse(slot)
        if slot.read_by is not None:
            h2d.wait_event(slot.free)
        for reader in slot.readers:
            if reader is slot.read_by:
                continue
            # Recorded now, it covers every kernel launched so far, the last reader's among them.
            self._streams.reads(reader, slot, "last use")
            slot.free.record(reader)
            h2d.wait_event(slot.free)
        slot.readers, slot.read_by = [], None
        if self._poison:
            self._streams.writes(h2d, slot, "poison")
            with self._streams.on(h2d), torch.no_grad():
                slot.bytes.fill_(0xFF)
