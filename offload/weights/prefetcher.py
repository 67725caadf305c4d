"""Onloading: units into device slots ahead of use, and which unit makes way."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.optimizer.worker import UpdateWorker
from offload.runtime.device_slots import DeviceSlot, DeviceSlots
from offload.runtime.registry import Event
from offload.runtime.transfer import Transfer
from offload.weights.access_order import AccessOrder
from offload.weights.units import OffloadUnit, UnitTensor


class Prefetcher:
    """Keeps the units that compute needs next in a fixed pool of slots.

    Two orders hold throughout: compute does not read a slot before the copy that fills it is done, and a copy does
    not overwrite a slot before the streams that read it are.
    """

    def __init__(self, units: list[OffloadUnit], slots: DeviceSlots, transfer: Transfer, prefetch: int, poison: bool):
        """`prefetch` is how many visits ahead units are fetched. `poison` fills freed slots with NaN, so that a stale
        read shows in the result; it costs the device's memory bandwidth."""
        self._units = units
        self._slots = slots
        self._transfer = transfer
        self._streams = transfer.streams
        self._prefetch = prefetch
        self._poison = poison
        self._access_order = AccessOrder()
        self._slot_of: dict[OffloadUnit, DeviceSlot] = {}
        self._in_step = False
        self._recent: deque[OffloadUnit] = deque(maxlen=1)
        self._pinned: set[OffloadUnit] = set()
        self._unread: dict[OffloadUnit, Event] = {}
        self.updates: UpdateWorker | None = None
        for slot in slots:
            # The allocator may hand out memory that kernels already queued still use.
            slot.readers = [self._streams.compute]
            self._release(slot)

    def begin_step(self) -> None:
        """Starts fetching what the step will use first. The weights at home are final, or `updates` knows better."""
        self._access_order.begin()
        self._in_step = True
        self._fetch_ahead(len(self._slots.all))

    def first_use(self, unit: OffloadUnit) -> float:
        """When a step uses `unit` first: the lower, the sooner."""
        return self._access_order.first_use(unit.index)

    def unread(self, unit: OffloadUnit) -> list[Event]:
        """The end of the last copy of `unit` to the device, where nothing on the device has waited for it yet."""
        return [self._unread[unit]] if unit in self._unread else []

    def end_step(self) -> None:
        """Forgets what the slots hold: the weights at home may change before the next step."""
        self._access_order.end()
        self._in_step = False
        self.drop()
        self._unread.clear()

    def drop(self) -> None:
        """Empties every slot."""
        for unit in list(self._slot_of):
            self.forget(unit)

    def forget(self, unit: OffloadUnit) -> None:
        """Empties the slot of `unit`, if it has one: its next visit copies it in again."""
        if unit in self._slot_of:
            slot = self._evict(unit)
            if not self._in_step and not self._is_pending(unit) and unit.updated is None:
                # Outside a step the host may use the weights at home as soon as this call returns.
                slot.ready.synchronize()
                if unit.written is not None:
                    unit.written.synchronize()
                self._streams.writes(None, unit.weights, "the host's next change")
        if unit in self._recent:
            self._recent.remove(unit)

    def visit(self, unit: OffloadUnit, in_window: bool = False) -> DeviceSlot:
        """The slot that holds `unit`, for the current compute stream to read from now on.

        It keeps the slot while a window is open on it (`in_window` opens one, for the caller to close), otherwise
        until as many other units have been visited as one operation may read. Raises RuntimeError when every slot is
        taken by a unit in use.
        """
        if self._in_step:
            self._access_order.visit(unit.index)
        if in_window:
            # Operations of backward whose weights were unpacked before have been queued by now.
            self._recent.clear()
        else:
            self._remember(unit)
        slot = self._slot_of.get(unit) or self._fill(unit, self._make_room())
        if in_window:
            unit.open_windows += 1
            self._allow_for_open_windows()
        stream = self._streams.compute
        if stream not in slot.readers:
            self._transfer.await_on(stream, slot.ready)
            slot.readers.append(stream)
        if self._streams.d2h in slot.readers:
            # A write back still reads what a new forward may update.
            self._transfer.await_on(stream, unit.written)
        self._streams.reads(stream, slot, f"use of {unit}")
        self._unread.pop(unit, None)
        if self._in_step:
            self._fetch_ahead(self._prefetch)
        return slot

    @contextmanager
    def holding(self) -> Iterator[None]:
        """What was visited last is in the same slot after the block, whatever the block visits.

        It stays there if the slots suffice, and is copied in again if not.
        """
        recent, pinned = list(self._recent), self._pinned
        held = {unit: self._slot_of[unit] for unit in recent if unit in self._slot_of}
        self._pinned = pinned.union(held)
        try:
            yield
        finally:
            self._pinned = pinned
            self._recent = deque(recent, maxlen=self._recent.maxlen)
        for unit, slot in held.items():
            if slot.content is not unit:
                self._put_back(unit, slot)

    def _put_back(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        for other in (unit, slot.content):
            if other in self._slot_of:
                self._evict(other)
        self._fill(unit, slot)
        self.visit(unit)

    def write_home(self, unit: OffloadUnit, tensors: list[UnitTensor]) -> None:
        """Copies tensors of `unit` that compute changed in its slot back to the host block."""
        streams, slot = self._streams, self._slot_of[unit]
        streams.writes(streams.compute, slot, f"update of {unit}")
        self._transfer.after_compute(streams.d2h)
        streams.reads(streams.d2h, slot, f"write back of {unit}")
        streams.writes(streams.d2h, unit.weights, f"write back of {unit}")
        unit.written = streams.event()
        for tensor in tensors:
            home = tensor.view_of(unit.weights.bytes)
            self._transfer.copy_out(home, tensor.device, done=unit.written, what=tensor.name)
        if streams.d2h not in slot.readers:
            slot.readers.append(streams.d2h)

    def _allow_for_open_windows(self) -> None:
        """An operation reads at most the units whose windows were open around it: as many visits are remembered."""
        open_units = sum(1 for unit in self._slot_of if unit.open_windows)
        if open_units > self._recent.maxlen:
            self._recent = deque(self._recent, maxlen=open_units)

    def _remember(self, unit: OffloadUnit) -> None:
        if unit in self._recent:
            self._recent.remove(unit)
        self._recent.append(unit)

    def _fetch_ahead(self, count: int) -> None:
        for index in self._access_order.upcoming(count):
            unit = self._units[index]
            if unit in self._slot_of:
                continue
            slot = self._spare() or self._evict_later_than(unit)
            if slot is None:
                return
            if self._is_pending(unit):
                # The host goes on to queue what compute can do in the meantime. The slot was given up before that:
                # given up later, it would be free only behind that work.
                return
            self._fill(unit, slot)

    def _is_pending(self, unit: OffloadUnit) -> bool:
        return self.updates is not None and self.updates.is_pending(unit)

    def _make_room(self) -> DeviceSlot:
        slot = self._spare()
        if slot is not None:
            return slot
        spared = [other for other in self._slot_of if not other.open_windows and other not in self._recent]
        farthest = self._access_order.farthest(other.index for other in self._evictable() or spared)
        if farthest is None:
            held = ", ".join(str(other) for other in self._slot_of)
            raise RuntimeError(
                f"a device slot is needed while all {len(self._slots.all)} are in use by {held}:"
                " give the mode more slots"
            )
        return self._evict(self._units[farthest])

    def _spare(self) -> DeviceSlot | None:
        return next((slot for slot in self._slots if slot.content is None), None)

    def _evictable(self) -> list[OffloadUnit]:
        kept = self._pinned.union(self._recent)
        return [unit for unit in self._slot_of if not unit.open_windows and unit not in kept]

    def _evict_later_than(self, wanted: OffloadUnit) -> DeviceSlot | None:
        farthest = self._access_order.farthest(unit.index for unit in self._evictable())
        if farthest is None or self._access_order.next_use(farthest) <= self._access_order.next_use(wanted.index):
            return None
        return self._evict(self._units[farthest])

    def _evict(self, unit: OffloadUnit) -> DeviceSlot:
        slot = self._slot_of.pop(unit)
        slot.content = None
        self._release(slot)
        return slot

    def _release(self, slot: DeviceSlot) -> None:
        h2d = self._streams.h2d
        for reader in slot.readers:
            # Recorded now, it covers every kernel launched so far, the last reader's among them.
            self._streams.reads(reader, slot, "last use")
            slot.free.record(reader)
            h2d.wait_event(slot.free)
        slot.readers = []
        if self._poison:
            self._streams.writes(h2d, slot, "poison")
            with self._streams.on(h2d), torch.no_grad():
                slot.bytes.fill_(0xFF)

    def _fill(self, unit: OffloadUnit, slot: DeviceSlot) -> DeviceSlot:
        if self.updates is not None:
            self.updates.wait(unit)
        if unit.updated is not None:
            self._streams.h2d.wait_event(unit.updated)
        # A write back of this unit is over by now as h2d sees it: its slot was released behind it.
        self._streams.reads(self._streams.h2d, unit.weights, f"onload of {unit}")
        self._streams.writes(self._streams.h2d, slot, f"onload of {unit}")
        self._transfer.copy_in(slot.bytes[: unit.nbytes], unit.weights.bytes, done=slot.ready, what=unit.name)
        self._unread[unit] = slot.ready
        slot.content = unit
        self._slot_of[unit] = slot
        return slot
