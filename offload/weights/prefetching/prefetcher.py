"""Fetches units into device slots ahead of use, and chooses the unit that makes way.

[Note: when a unit stays in its slot]

The host may change the weights at home, and not every change shows. So a slot keeps its unit only while they are
promised to stay as they are: inside a step, inside `inference`, and during a forward. At the end of each, the slots are
emptied and the host waits for the copies in. In a step and in `inference` units are fetched ahead of use.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from offload.memory.device_slots import DeviceSlot
from offload.streams.transfer import Transfer
from offload.torch_private.torch_internals import is_in_backward
from offload.weights.prefetching.access_order import AccessOrder, RepeatedOrder
from offload.weights.prefetching.slot_contents import Filler, Forecast, SlotContents
from offload.weights.units.unit import OffloadUnit


class _Promised(dict[OffloadUnit, list[tuple]]):
    """The parameters of units as they were when each was copied in first, inside inference: they stay so."""

    def note(self, unit: OffloadUnit) -> None:
        self.setdefault(unit, unit.parameters_now())

    def check(self, units: Iterable[OffloadUnit]) -> None:
        """Raises RuntimeError for a parameter of `units` that has changed since.

        A copy may have been reading the weights at that moment, so the results of earlier forwards are in doubt too.
        """
        for unit in units:
            if unit in self and self[unit] != unit.parameters_now():
                raise RuntimeError(
                    f"a parameter of {unit} was changed inside attached.inference(), where weights stay as they are:"
                    " change it between two of them, and take no result of this one"
                )


class Prefetcher:
    """Keeps the units that compute needs next in the slots of `contents`."""

    def __init__(
        self, units: list[OffloadUnit], contents: SlotContents, transfer: Transfer, ahead: int, filler: Filler
    ):
        """`ahead` is the number of uses ahead for which units are fetched. `filler` is that of `contents`."""
        self._units = units
        self.contents = contents
        self._streams = transfer.streams
        self._telemetry = transfer.telemetry
        self._ahead = ahead
        self._filler = filler
        self._slot_of = contents.slot_of
        self.access_order = AccessOrder()
        """the uses of a step"""
        self._inference_order = RepeatedOrder()
        # The one of the two that is followed now, if any.
        self._followed: AccessOrder | RepeatedOrder | None = None
        self.promised = _Promised()
        # Units fetched last outside of windows: an operation of backward that is not queued yet may read them. It reads
        # at most those whose windows were open around it.
        self._recent: deque[OffloadUnit] = deque(maxlen=1)
        self._retained: set[OffloadUnit] = set()
        # The unit of the last fetch, if that was outside of windows.
        self._latest: OffloadUnit | None = None
        self.prefetch_waits = False
        """the last fetch ahead ended at a unit that was not ready: its update or its read had not ended"""

    def begin_step(self) -> None:
        """Starts fetching the units that the step will use first."""
        self.access_order.begin()
        self._begin(self.access_order)

    def end_step(self) -> None:
        """Empties every slot, because the weights at home may change before the next step.

        Blocks the host until no copy in reads them.
        """
        self.access_order.end()
        self._followed = self._latest = None
        self.contents.end_step()
        self._recent.clear()

    def begin_inference(self) -> None:
        """Starts fetching the units that a forward will use first, if forwards were seen before."""
        self.promised.clear()
        self._begin(self._inference_order)

    def begin_forward(self) -> None:
        """Begins a forward outside of steps and inference, in which units stay in their slots."""
        for unit in self._units:
            unit.notice_writes()
        self._begin(None)

    def release_for_host_writes(self) -> None:
        """Ends inference or a forward: empties every slot, but for units with open windows, which a later call lets go.

        Afterwards the host may change the weights at home.
        """
        self._followed = self._latest = None
        self.contents.release_for_host_writes()
        self._recent.clear()
        # No step will end and do so: the events of many forwards would wait.
        self._telemetry.collect()

    def evict_all(self) -> None:
        """Empties every slot on which no window is open."""
        self.contents.evict_all()
        self._recent.clear()

    def fetch(self, unit: OffloadUnit, in_window: bool = False) -> DeviceSlot:
        """Returns the slot that has `unit`, for the current compute stream to read from now on.

        The unit keeps it while a window is open on it (`in_window` opens one), or until as many others have been
        fetched as one operation may read. Raises RuntimeError when every slot has a unit in use.
        """
        if unit is self._latest and not in_window:
            slot = self._slot_of.get(unit)
            if slot is not None and slot.read_by is None and slot.readers == [self._streams.compute]:
                # One operation of backward after the other asks for the weights of the same unit.
                if self.prefetch_waits:
                    self.try_again()
                return slot
        self._latest = None if in_window else unit
        if self._followed is self.access_order:
            in_backward = is_in_backward()
            if self._filler.follows_uses:
                self._filler.note_use(unit, in_backward)
            self.access_order.record(unit.index, in_backward=in_backward)
        elif self._followed is not None:
            self._followed.record(unit.index)
            if in_window:
                self.promised.check([unit])
        if in_window:
            # Operations of backward whose weights were unpacked before have been queued by now.
            self._recent.clear()
        else:
            if unit in self._recent:
                self._recent.remove(unit)
            self._recent.append(unit)
        slot = self._slot_of.get(unit)
        by_user = in_window and not unit.open_windows and not (unit.has_begun_updates and is_in_backward())
        # Version counters do not show an update that has begun and not ended, or that was undone.
        if slot is not None and by_user and (unit.has_begun_updates or slot.source != unit.weights_now()):
            # Its user has changed the weights since: LBFGS or SAM, with the step around all of their passes.
            self.contents.evict(unit)
            slot = None
        slot = slot or self._fill_now(unit, self._make_room())
        unit.open_windows += in_window
        try:
            if in_window:
                open_units = sum(each.open_windows > 0 for each in self._slot_of)
                if open_units > self._recent.maxlen:
                    self._recent = deque(self._recent, maxlen=open_units)
            self.contents.let_compute_read(unit)
            self._fetch_ahead(self._ahead)
            if self._filler.follows_uses:
                self._look_ahead()
        except BaseException:
            # The caller knows of no window, and would close none.
            unit.open_windows -= in_window
            raise
        return slot

    def try_again(self) -> None:
        """Fetches ahead after a fetch that was put off."""
        self._fetch_ahead(self._ahead)

    @contextmanager
    def retain_recent(self) -> Iterator[None]:
        """Keeps the units fetched last in the same slots until the block has ended, whatever it fetches.

        They stay there if the slots suffice, and are copied in again if not.
        """
        recent, retained_before = list(self._recent), self._retained
        retained = {unit: self._slot_of[unit] for unit in recent if unit in self._slot_of}
        self._retained = retained_before.union(retained)
        try:
            yield
        finally:
            self._latest = None
            self._retained = retained_before
            self._recent = deque(recent, maxlen=self._recent.maxlen)
        for unit, slot in retained.items():
            if slot.content is not unit:
                for other in (unit, slot.content):
                    if other in self._slot_of:
                        self.contents.evict(other)
                self._fill_now(unit, slot)
                self.fetch(unit)
                continue
            # A window in the block may have closed on the unit, or the unit may have come in anew. The operation that
            # asked for it before still reads it.
            self.contents.let_compute_read(unit)

    def _begin(self, order: AccessOrder | RepeatedOrder | None) -> None:
        # A backward outside of steps may have left units there, whose weights may have changed.
        self.evict_all()
        self._filler.begin(order is self.access_order)
        self._followed, self._latest = order, None
        if self._filler.follows_uses:
            self._look_ahead()
        self._fetch_ahead(self.contents.slots)

    def _fetch_ahead(self, count: int) -> None:
        self.prefetch_waits = False
        if self._followed is None:
            return
        for index in self._followed.upcoming(count):
            unit = self._units[index]
            if unit in self._slot_of:
                continue
            slot = self.contents.free_slot() or self._evict_later_than(unit)
            if slot is None:
                return
            if not self._filler.is_ready(unit, slot):
                # The host goes on and queues other work for compute. The slot was given up before: given up later, it
                # would be free only behind that work.
                self.prefetch_waits = True
                return
            self._fill(unit, slot)

    def _look_ahead(self) -> None:
        order = self._followed
        if order is None:
            return
        next_step = order.order if order is self.access_order else ()
        held = [unit.index for unit in self._slot_of]
        self._filler.look_ahead(Forecast(order.upcoming, next_step, held, self.contents.slots))

    def _make_room(self) -> DeviceSlot:
        slot = self.contents.free_slot()
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
                f"a device slot is needed while all {self.contents.slots} are in use by {in_use}:"
                " give the mode more slots"
            )
        return self.contents.evict(self._units[farthest])

    def _evictable(self) -> list[OffloadUnit]:
        kept = self._retained.union(self._recent)
        return [unit for unit in self._slot_of if not unit.open_windows and unit not in kept]

    def _evict_later_than(self, wanted: OffloadUnit) -> DeviceSlot | None:
        order = self._followed
        farthest = order.farthest([unit.index for unit in self._evictable()])
        if farthest is None or order.next_use(farthest) <= order.next_use(wanted.index):
            return None
        return self.contents.evict(self._units[farthest])

    def _fill_now(self, unit: OffloadUnit, slot: DeviceSlot) -> DeviceSlot:
        self._filler.await_ready(unit, slot)
        return self._fill(unit, slot)

    def _fill(self, unit: OffloadUnit, slot: DeviceSlot) -> DeviceSlot:
        self.contents.fill(unit, slot)
        if self._followed is self._inference_order:
            self.promised.note(unit)
        return slot
