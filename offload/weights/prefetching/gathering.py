"""Brings a unit into a slot together with the sharers of its home: each copies in its slices, all gather them.

A slice comes over this device's own link to the host, the rest over the links between the devices. Copies run on the
h2d stream, exchanges between the devices on the gather stream, a chunk behind them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from offload.memory.device_slots import DeviceSlot
from offload.sharing.links import Links
from offload.sharing.sharers import OWN_HOMES, Sharers
from offload.streams.transfer import Transfer, profiled
from offload.weights.gradients.summing import GradientSum
from offload.weights.units.slices import slices_of
from offload.weights.units.unit import OffloadUnit

# In place of a unit's index: the step has ended, and nothing is fetched any more.
END_OF_STEP = -1
# Or: gradients are to be summed, whatever the others are about to do.
SUMS_ALONE = -2

# What a sharer says of a unit that is to be fetched: an update of it has not ended. From PLACE_BIT on follows the place
# of its slot.
PENDING, PLACE_BIT = 1, 1


class Agreement(NamedTuple):
    """What sharers agree on for a fetch.

    `pending`: an update has not ended on one. `places`: those of the slots into which each gathers the unit.
    """

    pending: bool
    places: list[int]


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

    def __init__(
        self, sharers: Sharers, links: Links, units: list[OffloadUnit], transfer: Transfer, gradients: GradientSum
    ):
        self._sharers = sharers
        self._links = links
        self._units = units
        self._transfer = transfer
        self._gradients = gradients
        self._chunks: dict[tuple[int, int], _Chunk] = {}
        self._last_in_backward: OffloadUnit | None = None
        self._not_agreed_on: OffloadUnit | None = None

    def agree(self, unit: OffloadUnit, slot: DeviceSlot, ahead: bool, pending: bool) -> Agreement | None:
        """Agrees with the sharers on a fetch into `slot`. `ahead`: the unit is fetched ahead of its use.

        None: ask anew, with `pending` as it is then (`agree_on_sums`).

        `pending`: an update of the unit has not ended here; else it has been waited for. The update counts that begins
        with this exchange. Raises RuntimeError if a sharer is about to do something else.
        """
        name = f"{unit} {'ahead of its use' if ahead else 'for its use'}"
        had_begun = unit.has_begun_updates
        flags = PENDING * pending | self._links.place_of(slot.bytes) << PLACE_BIT
        if (exchanged := self._exchange(unit.index, ahead, flags, f"the fetch of {name}", everywhere=False)) is None:
            return None
        found, _ = exchanged
        begins = unit.has_begun_updates and not had_begun
        return Agreement(any(flags & PENDING for flags in found) or begins, [flags >> PLACE_BIT for flags in found])

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        """Takes the use of a unit in a step. Where it is another than the last one in backward, all sharers agree.

        So gradients are summed also where units that are still in their slots are not fetched again. All hosts come to
        this, while only the sharers of one host take part in a fetch. On one host a fetch before `after_use` will do.
        """
        if in_backward and unit is not self._last_in_backward:
            self._not_agreed_on = unit
            if self._sharers.hosts > 1:
                self.after_use()
        self._last_in_backward = unit if in_backward else None

    def after_use(self) -> None:
        """Agrees on the use that was noted last, unless the sharers have exchanged their gradients since."""
        unit, self._not_agreed_on = self._not_agreed_on, None
        if unit is not None:
            while self._exchange(unit.index, False, 0, f"the use of {unit} in backward", everywhere=True) is None:
                pass

    def agree_on_end(self) -> None:
        """Sums the gradients that all sharers have and have not summed yet.

        Raises RuntimeError if a sharer fetches another unit in this step, which this one has ended.
        """
        exchanged = None
        # Until there was nothing left to sum.
        while exchanged is None or exchanged[1]:
            exchanged = self._exchange(END_OF_STEP, False, 0, "the end of a step", everywhere=True)

    def agree_on_sums(self) -> None:
        """Sums the gradients that all sharers have now, between two of their fetches.

        Not every sharer has to call it, or as often as another: the others repeat the exchange that they have come to.
        Over several hosts, which exchange in two kinds of circles, it does nothing.
        """
        if self._sharers.hosts == 1:
            self._exchange(SUMS_ALONE, False, 0, "a sum of gradients", everywhere=False)

    def fill(self, unit: OffloadUnit, slot: DeviceSlot, places: Sequence[int]) -> None:
        """Queues the copies of this process's slices and the gathers of all; `slot.ready` ends the last of these.

        `places` are those of the sharers' slots. The slot is as large as the unit's slices with their padding, and free
        as the h2d stream sees it.
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
                self._links.gather(slot.bytes[slice(*chunk)], places, what)
        streams.writes(gather, slot, f"gather of {unit}")
        slot.ready.record(gather)

    def _exchange(
        self, index: int, ahead: bool, flags: int, what: str, everywhere: bool
    ) -> tuple[list[int], bool] | None:
        """Returns the flags of each sharer, and whether gradients were summed.

        None where a sharer came for sums alone: what the others came for is to be asked anew, as updates may have
        begun behind these sums.
        `everywhere`: with the sharers of all hosts, who sum gradients together.
        """
        sharers = self._sharers
        sums = everywhere or sharers.hosts == 1
        offers = self._gradients.offers() if sums else ()
        # On one host there is one kind of exchange, so that a sharer at its end meets one that still fetches.
        everywhere = everywhere and sharers.hosts > 1
        found = sharers.exchange((index, int(ahead), flags, *offers), what, everywhere=everywhere)
        for rank, theirs in enumerate(found, start=0 if everywhere else sharers.first):
            if SUMS_ALONE not in (index, theirs[0]) and theirs[:2] != [index, int(ahead)]:
                raise RuntimeError(
                    f"rank {sharers.first + sharers.rank} has come to {what}, rank {rank} to {self._named(theirs[0])}:"
                    f" processes that share weights must use them in the same order; {OWN_HOMES}"
                )
        summed = sums and self._gradients.sum_common([theirs[3:] for theirs in found])
        if any(theirs[0] == SUMS_ALONE for theirs in found):
            return None
        if sums:
            self._not_agreed_on = None
        return [theirs[2] for theirs in found], summed

    def _named(self, index: int) -> str:
        if index == END_OF_STEP:
            return "the end of a step"
        return f"the fetch of {self._units[index]}" if index < len(self._units) else "another exchange"
