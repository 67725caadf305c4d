"""Fetches units into device slots ahead of use, and chooses the unit that makes way.

[Note: the life of a slot]

- Free. `content` is None, and the h2d stream already waits for every stream that has read the slot.
- Filling. `_fill` queues the copy of a unit on the h2d stream and records `ready` behind it; `content` is the unit.
- Read. The first `fetch` after that makes compute wait for `ready` and adds it to `readers`. `write_home` adds the d2h
  stream, which copies changed buffers out of the slot. The slot keeps its unit while a window is open on the unit,
  while the unit is among those fetched last in backward, and inside `retain_recent`.
- Read so far. `no_window_left` records `free` on compute: what is queued later does not read the slot, until the next
  `fetch` of the unit.
- Released. `_evict` records `free` on the other readers, on compute if the unit was fetched since, and makes the h2d
  stream wait for it, so that the next copy into the slot comes after all that reads it: the slot is free. Recorded only
  now, `free` would come after the work of other units that compute was given meanwhile, and the copy would wait for it.

[Note: when a unit stays in its slot]

The host may change the weights at home, and not every change shows. So a slot keeps its unit only while they are
promised to stay as they are: inside a step, inside `inference`, and during a forward. At the end of each, the slots are
emptied and the host waits for the copies in. In a step and in `inference` units are fetched ahead of use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from offload.runtime.device_slots import DeviceSlot, DeviceSlots
from offload.runtime.registry import Event
from offload.runtime.torch_internals import is_in_backward
from offload.runtime.transfer import Transfer
from offload.weights.access_order import AccessOrder
from offload.weights.repeated_order import RepeatedOrder
from offload.weights.units import OffloadUnit, UnitTensor
from offload.weights.updates import NO_UPDATES, Updates


class Prefetcher:
    """Keeps the units that compute needs next in a fixed pool of slots.

    Two orders hold throughout: compute reads a slot after the copy that fills it, and a copy fills a slot after all
    streams that read it before. `updates` is asked before a unit is copied in.
    """

    def __init__(self, units: list[OffloadUnit], slots: DeviceSlots, transfer: Transfer, prefetch: int, poison: bool):
        """`prefetch` is the number of uses ahead for which units are fetched.

        `poison` fills freed slots with NaN, so that a stale read shows in the result; it costs the device's memory
        bandwidth.
        """
        self.updates: Updates = NO_UPDATES
        self._units = units
        self._slots = slots
        self._transfer = transfer
        self._streams = transfer.streams
        self._prefetch = prefetch
        self._poison = poison
        self._access_order = AccessOrder()
        self._inference_order = RepeatedOrder()
        # The one of the two that is followed now, if any.
        self._followed: AccessOrder | RepeatedOrder | None = None
        self._slot_of: dict[OffloadUnit, DeviceSlot] = {}
        # Units that were copied in since the host last might change the weights.
        self._copied: set[OffloadUnit] = set()
        # Inside inference: the parameters of each unit as they were when it was copied in first.
        self._promised: dict[OffloadUnit, list[tuple[int, int]]] = {}
        # Units fetched last outside of windows: an operation of backward that is not queued yet may read them.
        self._recent: deque[OffloadUnit] = deque(maxlen=1)
        self._retained: set[OffloadUnit] = set()
        self._unawaited: dict[OffloadUnit, Event] = {}
        for slot in slots:
            # The allocator may hand out memory that kernels already queued still use.
            slot.readers = [self._streams.compute]
            self._release(slot)

    def begin_step(self) -> None:
        """Starts fetching the units that the step will use first."""
        self._access_order.begin()
        self._begin(self._access_order)

    def end_step(self) -> None:
        """Empties every slot, because the weights at home may change before the next step.

        The caller waits for the device afterwards.
        """
        self._access_order.end()
        self._followed = None
        self.evict_all()
        self._copied.clear()
        self._unawaited.clear()

    def begin_inference(self) -> None:
        """Starts fetching the units that a forward will use first, if forwards were seen before."""
        self._promised.clear()
        self._begin(self._inference_order)

    def check_promise(self) -> None:
        """Raises RuntimeError if a parameter has changed since its unit was copied in, inside `inference`.

        A copy may have been reading the weights at that moment, so the results of earlier forwards are in doubt too.
        """
        for unit in self._promised:
            self._check_promise(unit)

    def begin_forward(self) -> None:
        """Begins a forward outside of steps and inference, in which units stay in their slots."""
        self._begin(None)

    def let_host_write(self) -> None:
        """Ends inference or a forward: empties every slot, but for units with open windows, which a later call lets go.

        Afterwards the host may change the weights at home.
        """
        self._followed = None
        copied = self._streams.event()
        # Before slots are released, for which h2d waits for compute.
        copied.record(self._streams.h2d)
        self.evict_all()
        copied.synchronize()
        for unit in [unit for unit in self._copied if not unit.open_windows]:
            if unit.written is not None:
                unit.written.synchronize()
            self._streams.writes(None, unit.weights, "the host's next change")
            self._copied.remove(unit)
        self._unawaited.clear()
        # No step will end and do so: the events of many forwards would wait.
        self._transfer.telemetry.collect()

    def evict_all(self) -> None:
        """Empties every slot on which no window is open."""
        for unit in list(self._slot_of):
            if not unit.open_windows:
                self._evict(unit)
        self._recent.clear()

    def slot_of(self, unit: OffloadUnit) -> DeviceSlot:
        """Returns the slot of a unit that has one, as a unit with an open window does."""
        return self._slot_of[unit]

    def first_use(self, unit: OffloadUnit) -> float:
        """Returns the position of the unit's first use in a step; the lower, the sooner."""
        return self._access_order.first_use(unit.index)

    def unawaited_copy(self, unit: OffloadUnit) -> list[Event]:
        """Returns the end of the last copy of `unit` to the device, if no stream has waited for it yet.

        The unit was then fetched ahead and has not been used, so the copy may still be reading the home.
        """
        return [self._unawaited[unit]] if unit in self._unawaited else []

    def fetch(self, unit: OffloadUnit, in_window: bool = False) -> DeviceSlot:
        """Returns the slot that has `unit`, for the current compute stream to read from now on.

        The unit keeps the slot while a window is open on it (`in_window` opens one, `close_window` closes it), else
        until as many other units have been fetched as one operation may read. Raises RuntimeError when every slot has a
        unit in use.
        """
        if self._followed is self._access_order:
            self._access_order.record(unit.index, in_backward=is_in_backward())
        elif self._followed is not None:
            self._followed.record(unit.index)
            if in_window:
                self._check_promise(unit)
        if in_window:
            # Operations of backward whose weights were unpacked before have been queued by now.
            self._recent.clear()
        else:
            self._remember(unit)
        slot = self._slot_of.get(unit)
        if slot is not None and in_window and not unit.open_windows and slot.source != unit.weights_now():
            # Its user has changed the weights since: LBFGS or SAM, with the step around all of their passes.
            self._evict(unit)
            slot = None
        slot = slot or self._fill(unit, self._make_room())
        slot.read_by = None
        if in_window:
            unit.open_windows += 1
            self._allow_for_open_windows()
        stream = self._streams.compute
        if stream not in slot.readers:
            self._transfer.await_on(stream, slot.ready)
            slot.readers.append(stream)
        if self._streams.d2h in slot.readers:
            # Buffers that are being copied home may be updated by this use.
            self._transfer.await_on(stream, unit.written)
        self._streams.reads(stream, slot, f"use of {unit}")
        self._unawaited.pop(unit, None)
        self._fetch_ahead(self._prefetch)
        return slot

    def close_window(self, unit: OffloadUnit) -> bool:
        """Closes a window on `unit` that `fetch` opened. Returns True if no other is open."""
        unit.open_windows -= 1
        return not unit.open_windows

    def no_window_left(self, unit: OffloadUnit) -> None:
        """Notes that nothing which compute is given from now on reads the slot of `unit`, until the next `fetch`."""
        slot, stream = self._slot_of[unit], self._streams.compute
        if stream in slot.readers:
            self._streams.reads(stream, slot, f"use of {unit}")
            slot.free.record(stream)
            slot.read_by = stream

    @contextmanager
    def retain_recent(self) -> Iterator[None]:
        """The units fetched last are in the same slots after the block, whatever the block fetches.

        They stay there if the slots suffice, and are copied in again if not.
        """
        recent, retained_before = list(self._recent), self._retained
        retained = {unit: self._slot_of[unit] for unit in recent if unit in self._slot_of}
        self._retained = retained_before.union(retained)
        try:
            yield
        finally:
            self._retained = retained_before
            self._recent = deque(recent, maxlen=self._recent.maxlen)
        for unit, slot in retained.items():
            if slot.content is not unit:
                self._put_back(unit, slot)

    def write_home(self, unit: OffloadUnit, tensors: list[UnitTensor]) -> None:
        """Copies tensors of `unit` that compute changed in its slot back to the host block; `unit.written` ends it."""
        streams, slot = self._streams, self._slot_of[unit]
        streams.writes(streams.compute, slot, f"update of {unit}")
        self._transfer.after_compute(streams.d2h)
        streams.reads(streams.d2h, slot, f"write back of {unit}")
        streams.writes(streams.d2h, unit.weights, f"write back of {unit}")
        unit.written = streams.event()
        for tensor in tensors:
            homes = tensor.views_of(unit.weights.bytes)
            for home, changed in zip(homes, tensor.parts_of(tensor.device), strict=True):
                self._transfer.copy_out(home, changed, done=unit.written, what=tensor.name)
        if streams.d2h not in slot.readers:
            slot.readers.append(streams.d2h)

    def _begin(self, order: AccessOrder | RepeatedOrder | None) -> None:
        # A backward outside of steps may have left units there, whose weights may have changed.
        self.evict_all()
        self._followed = order
        self._fetch_ahead(len(self._slots.all))

    def _check_promise(self, unit: OffloadUnit) -> None:
        if unit in self._promised and self._promised[unit] != unit.parameters_now():
            raise RuntimeError(
                f"a parameter of {unit} was changed inside mode.inference(), where weights stay as they are: change it"
                " between two of them, and take no result of this one"
            )

    def _put_back(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        for other in (unit, slot.content):
            if other in self._slot_of:
                self._evict(other)
        self._fill(unit, slot)
        self.fetch(unit)

    def _allow_for_open_windows(self) -> None:
        """One operation reads at most the units whose windows were open around it: `_recent` has room for as many."""
        open_units = sum(1 for unit in self._slot_of if unit.open_windows)
        if open_units > self._recent.maxlen:
            self._recent = deque(self._recent, maxlen=open_units)

    def _remember(self, unit: OffloadUnit) -> None:
        if unit in self._recent:
            self._recent.remove(unit)
        self._recent.append(unit)

    def _fetch_ahead(self, count: int) -> None:
        if self._followed is None:
            return
        for index in self._followed.upcoming(count):
            unit = self._units[index]
            if unit in self._slot_of:
                continue
            slot = self._free_slot() or self._evict_later_than(unit)
            if slot is None:
                return
            if self.updates.is_pending(unit):
                # The host goes on and queues other work for compute. The slot was given up before: given up later, it
                # would be free only behind that work.
                return
            self._fill(unit, slot)

    def _make_room(self) -> DeviceSlot:
        slot = self._free_slot()
        if slot is not None:
            return slot
        # Retained units make way only if nothing else can.
        not_open = [other for other in self._slot_of if not other.open_windows and other not in self._recent]
        # Where no order is followed, the one that came in first.
        candidates = [other.index for other in self._evictable() or not_open]
        farthest = self._followed.farthest(candidates) if self._followed else next(iter(candidates), None)
        if farthest is None:
            in_use = ", ".join(str(other) for other in self._slot_of)
            raise RuntimeError(
                f"a device slot is needed while all {len(self._slots.all)} are in use by {in_use}:"
                " give the mode more slots"
            )
        return self._evict(self._units[farthest])

    def _free_slot(self) -> DeviceSlot | None:
        return next((slot for slot in self._slots if slot.content is None), None)

    def _evictable(self) -> list[OffloadUnit]:
        kept = self._retained.union(self._recent)
        return [unit for unit in self._slot_of if not unit.open_windows and unit not in kept]

    def _evict_later_than(self, wanted: OffloadUnit) -> DeviceSlot | None:
        order = self._followed
        farthest = order.farthest(unit.index for unit in self._evictable())
        if farthest is None or order.next_use(farthest) <= order.next_use(wanted.index):
            return None
        return self._evict(self._units[farthest])

    def _evict(self, unit: OffloadUnit) -> DeviceSlot:
        slot = self._slot_of.pop(unit)
        slot.content = None
        self._release(slot)
        return slot

    def _release(self, slot: DeviceSlot) -> None:
        h2d = self._streams.h2d
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

    def _fill(self, unit: OffloadUnit, slot: DeviceSlot) -> DeviceSlot:
        self.updates.before_onload(unit)
        # A write back of this unit is over by now as h2d sees it: its slot was released behind it.
        self._streams.reads(self._streams.h2d, unit.weights, f"onload of {unit}")
        self._streams.writes(self._streams.h2d, slot, f"onload of {unit}")
        self._transfer.copy_in(slot.bytes[: unit.nbytes], unit.weights.bytes, done=slot.ready, what=unit.name)
        for tensor in unit.strays():
            for view, given in zip(tensor.views_of(slot.bytes), tensor.parts_of(tensor.host), strict=True):
                self._transfer.copy_in(view, given.data, done=slot.ready, what=tensor.name)
        slot.source = unit.weights_now()
        if self._followed is self._inference_order:
            self._promised.setdefault(unit, unit.parameters_now())
        self._unawaited[unit] = slot.ready
        self._copied.add(unit)
        slot.content = unit
        self._slot_of[unit] = slot
        return slot
