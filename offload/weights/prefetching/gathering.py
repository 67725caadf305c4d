"""Brings a unit into a slot together with the sharers of its home: each copies in its slices, all gather them.

A slice comes over this device's own link to the host, the rest over the links between the devices. Copies run on the
h2d stream, collectives on the gather stream, a chunk behind them.
"""

from __future__ import annotations

from offload.runtime.memory.device_slots import DeviceSlot
from offload.runtime.sharing.sharers import OWN_HOMES, Sharers
from offload.runtime.streams.transfer import Transfer, profiled
from offload.weights.gradients.summing import GradientSum
from offload.weights.units.slices import slices_of
from offload.weights.units.unit import OffloadUnit

# In place of a unit's index: the step has ended, and nothing is fetched any more.
END_OF_STEP = -1


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
        pending_anywhere, _ = self._exchange(unit.index, ahead, pending, f"the fetch of {name}", everywhere=False)
        return pending_anywhere

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        """Takes the use of a unit in a step. Where it is another than the last one in backward, all sharers agree.

        So gradients are summed also where units that are still in their slots are not fetched again. All hosts come to
        this, while only the sharers of one host take part in a fetch.
        """
        if in_backward and unit is not self._last_in_backward:
            self._exchange(unit.index, False, False, f"the use of {unit} in backward", everywhere=True)
        self._last_in_backward = unit if in_backward else None

    def agree_on_end(self) -> None:
        """Sums the gradients that all sharers have and have not summed yet.

        Raises RuntimeError if a sharer fetches another unit in this step, which this one has ended.
        """
        summed = True
        while summed:
            _, summed = self._exchange(END_OF_STEP, False, False, "the end of a step", everywhere=True)

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

    def _exchange(self, index: int, ahead: bool, pending: bool, what: str, everywhere: bool) -> tuple[bool, bool]:
        """Returns whether `pending` is True on any sharer, and whether gradients were summed.

        `everywhere`: with the sharers of all hosts, who sum gradients together.
        """
        sharers = self._sharers
        sums = everywhere or sharers.hosts == 1
        offers = self._gradients.offers() if sums else ()
        # On one host there is one kind of exchange, so that a sharer at its end meets one that still fetches.
        everywhere = everywhere and sharers.hosts > 1
        found = sharers.exchange((index, int(ahead), int(pending), *offers), what, everywhere=everywhere)
        for rank, theirs in enumerate(found, start=0 if everywhere else sharers.first):
            if theirs[:2] != [index, int(ahead)]:
                raise RuntimeError(
                    f"rank {sharers.first + sharers.rank} has come to {what}, rank {rank} to {self._named(theirs[0])}:"
                    f" processes that share weights must use them in the same order; {OWN_HOMES}"
                )
        if not sums:
            return any(theirs[2] for theirs in found), False
        summed = self._gradients.sum_common([theirs[3:] for theirs in found])
        return any(theirs[2] for theirs in found), summed

    def _named(self, index: int) -> str:
        if index == END_OF_STEP:
            return "the end of a step"
        return f"the fetch of {self._units[index]}" if index < len(self._units) else "another exchange"
