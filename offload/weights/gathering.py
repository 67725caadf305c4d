"""Brings a unit into a slot together with the sharers of its home: each copies in its slices, all gather them.

A slice comes over this device's own link to the host, the rest over the links between the devices. Copies run on the
h2d stream, collectives on the gather stream, a chunk behind them.
"""

from __future__ import annotations

from offload.runtime.device_slots import DeviceSlot
from offload.runtime.sharers import Sharers
from offload.runtime.transfer import Transfer, profiled
from offload.weights.slices import slices_of
from offload.weights.summing import GradientSum
from offload.weights.units import OffloadUnit

# In place of a unit's index: the step has ended, and nothing is fetched any more.
END_OF_STEP = -1
# In place of a unit's index: no unit.
NOTHING = -2
# Units whose gradients may be summed at one fetch.
SUMS_AT_ONCE = 4


class _Chunk:
    """A chunk of a slot, as the stream checker knows it."""

    def __init__(self, slot: DeviceSlot, number: int):
        self._name = f"chunk {number} of {slot}"

    def __str__(self) -> str:
        return self._name


class SliceGatherer:
    """Fills slots with units whose home this process shares with `sharers`, of which there are several.

    Every sharer fetches the same units in the same order. Before each fetch the hosts exchange what they are about to
    fetch: so sharers whose forwards differ raise an error, where they would wait for each other for ever, or take bytes
    of one unit for those of another. With it goes which units have all their gradients: what all have is summed.
    """

    def __init__(self, sharers: Sharers, units: list[OffloadUnit], transfer: Transfer, gradients: GradientSum):
        self._sharers = sharers
        self._units = units
        self._transfer = transfer
        self._gradients = gradients
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._last_in_backward: OffloadUnit | None = None

    def agree(self, unit: OffloadUnit, ahead: bool, pending: bool = False) -> bool:
        """Returns True if `pending` is True on any sharer. `ahead`: the unit is fetched ahead of its use.

        Raises RuntimeError if a sharer is about to do something else.
        """
        name = f"{unit} {'ahead of its use' if ahead else 'for its use'}"
        pending_anywhere, _ = self._exchange(unit.index, ahead, pending, f"the fetch of {name}")
        return pending_anywhere

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        """Takes the use of a unit in a step. Where it is another than the last one in backward, all sharers agree.

        So gradients are summed also where units that are still in their slots are not fetched again.
        """
        if in_backward and unit is not self._last_in_backward:
            self.agree(unit, ahead=False)
        self._last_in_backward = unit if in_backward else None

    def agree_on_end(self) -> None:
        """Sums the gradients that all sharers have and have not summed yet.

        Raises RuntimeError if a sharer fetches another unit in this step, which this one has ended.
        """
        summed = True
        while summed:
            _, summed = self._exchange(END_OF_STEP, False, False, "the end of a step")

    def fill(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Queues the copies of this process's slices and the gathers of all; `slot.ready` ends the last of these.

        The slot is as large as the unit's slices with their padding, and free as the h2d stream sees it.
        """
        streams, sharers = self._transfer.streams, self._sharers
        h2d, gather = streams.h2d, streams.gather
        slices = slices_of(unit, sharers.count)
        for number, (chunk, own) in enumerate(zip(slices.chunks(), slices.own(sharers.rank), strict=True)):
            part = self._chunks.setdefault((slot.index, number), _Chunk(slot, number))
            streams.writes(h2d, part, f"onload of {unit}")
            copied, (start, end) = streams.event(), own
            source, what = unit.weights.bytes[start:end], f"slice {number} of {unit.name}"
            self._transfer.copy_in(slot.bytes[start:end], source, done=copied, what=what)
            gather.wait_event(copied)
            streams.writes(gather, part, f"gather of {unit}")
            with profiled(f"gather {what}"), streams.on(gather):
                sharers.gather(slot.bytes[slice(*chunk)], what)
        streams.writes(gather, slot, f"gather of {unit}")
        slot.ready.record(gather)

    def _exchange(self, index: int, ahead: bool, pending: bool, what: str) -> tuple[bool, bool]:
        """Returns whether `pending` is True on any sharer, and whether gradients were summed."""
        complete = [unit.index for unit in self._gradients.complete()[:SUMS_AT_ONCE]]
        complete += [NOTHING] * (SUMS_AT_ONCE - len(complete))
        found = self._sharers.exchange((index, int(ahead), int(pending), *complete), what)
        for rank, theirs in enumerate(found):
            if theirs[:2] != [index, int(ahead)]:
                raise RuntimeError(
                    f"rank {self._sharers.rank} has come to {what}, rank {rank} to {self._named(theirs[0])}: processes"
                    " that share weights must use them in the same order; give each process a home of its own"
                )
        # In the order of the first, which is then that of all.
        common = [number for number in found[0][3:] if number != NOTHING and all(number in other for other in found)]
        self._gradients.sum([self._units[number] for number in common])
        return any(theirs[2] for theirs in found), bool(common)

    def _named(self, index: int) -> str:
        return "the end of a step" if index == END_OF_STEP else f"the fetch of {self._units[index]}"
