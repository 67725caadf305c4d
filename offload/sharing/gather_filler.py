"""Brings units into slots together with the processes that share their homes: each copies in its slices, all gather.

A slice comes over this device's own link to the host, the rest over the links between the devices. Copies run on the
h2d stream, exchanges between the devices on the gather stream, a unit behind them. Outside of steps each process
copies whole units.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.memory.host_memory import HostArena
from offload.sharing.device_sums import DeviceSums
from offload.sharing.links import links_of
from offload.sharing.shared_memory import PagesAhead, in_pages, share_memory
from offload.sharing.sharers import OWN_HOMES, Sharers, meet
from offload.sharing.slices import check_divisible, gradient_buckets, slices_of
from offload.sharing.sum_memory import SumHome, SumRing, ring_bytes
from offload.sharing.summing import GradientSum
from offload.streams.transfer import Counters, Transfer, profiled
from offload.weights.gradients.landing import GradientLanding
from offload.weights.gradients.seams import Updates
from offload.weights.prefetching.slot_contents import Filler, Forecast
from offload.weights.units.partition import CutModel
from offload.weights.units.unit import OffloadUnit, UnitTensor

# In place of a unit's index: the step has ended, and nothing is fetched any more.
END_OF_STEP = -1
# Or: gradients are to be summed, whatever the others are about to do.
SUMS_ALONE = -2


class GatherFiller(Filler):
    """Units whose home this process shares with `sharers`, of which there are several; makes the sum of gradients."""

    follows_uses = True
    has_gradient_homes = False

    def __init__(
        self,
        cut: CutModel,
        transfer: Transfer,
        arena: HostArena,
        gradient_bytes: int,
        *,
        sharers: Sharers,
        state_bytes: int = 0,
        releases: bool = False,
    ):
        """Every sharer makes one of the same model, and waits for the others.

        `releases`: sums of gradients go to updates, and have no homes. Memory for `state_bytes` of the optimizer's
        states is made beside what follows (`take_states`). Raises ValueError for a parameter that cannot be shared, and
        MemoryError.
        """
        self._sharers, self._state_bytes, self._releases = sharers, state_bytes, releases
        self.updaters = sharers.count
        super().__init__(cut, transfer, arena, gradient_bytes)
        self._links = links_of(sharers, transfer.streams)
        self._agreement = Agreement(sharers, cut.units)
        self._sum_homes: dict[OffloadUnit, SumHome] = {}
        self._in_step = False
        # Where each sharer gathers the unit that is filled next: the places of their slots.
        self._places: list[int] | None = None
        # After the homes, beside their locking: the system makes pages no faster for two who ask at once.
        self._states = PagesAhead(sharers, state_bytes) if state_bytes else None

    def _make_homes(self, cut: CutModel, gradient_bytes: int) -> tuple[HostArena, int]:
        """Returns an arena that all sharers map, and the bytes of a unit with the padding of its slices."""
        for unit in cut.units:
            check_divisible(unit)
        slot_bytes = max((slices_of(unit, self._sharers.count).padded_bytes for unit in cut.units), default=0)
        if self._streams.device.type == "meta":
            # A dry run, without memory and alone.
            return HostArena(self._streams.device), slot_bytes
        if self._sharers.rank == 0:
            self._arena.require(cut.unit_bytes + gradient_bytes + self._state_bytes)
        nbytes = sum(in_pages(unit.nbytes) for unit in cut.units)
        if not self._releases:
            nbytes += sum(in_pages(unit.gradient_bytes) for unit in cut.units)
        return self._arena.over(share_memory(self._sharers, nbytes)), slot_bytes

    def take_states(self) -> PagesAhead | None:
        """Returns the memory for the states of the optimizer, once."""
        states, self._states = self._states, None
        return states

    def allocate_slot(self, nbytes: int) -> torch.Tensor:
        return self._links.allocate(nbytes)

    def bring_home(self, unit: OffloadUnit) -> None:
        super().bring_home(unit)
        self._sum_homes[unit] = SumHome(unit, None if self._releases else self.homes, self._sharers)

    def join(self, gradients: GradientLanding, on_device: Sequence[nn.Parameter]) -> None:
        sharers, links = self._sharers, self._links
        buckets = list(gradient_buckets(on_device, sharers.count * sharers.hosts))
        sums = [home.layout().nbytes for home in self._sum_homes.values()]
        if not any(sums) and sharers.hosts == 1:
            # Else what stays on the devices is summed in the room of what streams, or by collectives.
            sums = [bucket.nbytes for bucket in buckets]
        ring = SumRing(links, self._streams, ring_bytes(sums))
        stays = DeviceSums(sharers, links, ring, buckets, self._transfer, agree=self._agreement.on_sums)
        gradients.destination = self._agreement.gradients = GradientSum(
            sharers, links, ring, self._sum_homes, stays, self._transfer, gradients
        )
        # From here on the homes have the values that anybody gives them.
        meet(sharers, "attaching the model")

    def close(self) -> None:
        if states := self.take_states():
            states.close()
        self._links.close()
        super().close()

    def counters(self) -> Counters:
        homes = Counters(
            host_pinned_bytes=self.homes.pinned_bytes // self._sharers.count,
            host_pageable_bytes=self.homes.pageable_bytes,
        )
        return super().counters() + homes

    def check_changes(self, unit: OffloadUnit) -> None:
        if strays := unit.strays():
            raise RuntimeError(
                f"{strays[0].name} was given other data, and several processes share its memory: copy into it"
                " (parameter.data.copy_), or detach the mode first"
            )

    def check_written(self, unit: OffloadUnit, tensors: Sequence[UnitTensor]) -> None:
        raise RuntimeError(
            f"{tensors[0].name} was changed in a forward, and several processes share it: their changes would differ;"
            f" {OWN_HOMES}"
        )

    def begin(self, in_step: bool) -> None:
        self._in_step = in_step
        if in_step:
            # Compute may still wait for the last sums, and the copy of the batch for compute. In the same copy engine
            # that would wait for all weights which are queued before it.
            self._transfer.after_compute(self._streams.h2d)

    def end_step(self) -> None:
        self._in_step = False

    def abandon_step(self) -> None:
        self._links.let_go()

    def before_reuse(self, slot: DeviceSlot) -> None:
        # Compute, which waits for the gather, may not have read the slot.
        self._streams.h2d.wait_event(slot.ready)

    def is_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> bool:
        if not self._in_step:
            return super().is_ready(unit, slot)
        # In a step all sharers fetch the unit, or none.
        place = self._links.place_of(slot.bytes)
        self._places = self._agreement.on_fetch(unit, place, self.updates, ahead=True)
        return self._places is not None

    def await_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        if not self._in_step:
            super().await_ready(unit, slot)
            return
        self._places, place = None, self._links.place_of(slot.bytes)
        while self._places is None:
            self._places = self._agreement.on_fetch(unit, place, self.updates, ahead=False)

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        self._agreement.note_use(unit, in_backward)

    def look_ahead(self, forecast: Forecast) -> None:
        if self._in_step:
            self._agreement.on_use()

    def end_uses(self) -> None:
        self._agreement.on_end()

    def fill(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        if not self._in_step:
            super().fill(unit, slot)
            return
        gather, slices = self._streams.gather, slices_of(unit, self._sharers.count)
        start, end = slices.own(self._sharers.rank)
        copied, what = self._streams.event(), f"slice of {unit.name}"
        self._transfer.copy_in(slot.bytes[start:end], unit.weights.bytes[start:end], done=copied, what=what)
        gather.wait_event(copied)
        self._streams.writes(gather, slot, f"gather of {unit}")
        # The slot has room for all slices with their padding.
        with profiled(f"gather {what}"), self._streams.on(gather):
            self._links.gather(slot.bytes[: slices.padded_bytes], self._places, what)
        slot.ready.record(gather)


class Agreement:
    """Agrees with `sharers`, before anything that all do in a step, on what that is, and on the sums that come first.

    Before each fetch the hosts exchange what they are about to fetch, and which of the `gradients` are complete. So
    sharers whose forwards differ raise a RuntimeError, where they would wait for ever or take bytes of one unit for
    another's.
    """

    def __init__(self, sharers: Sharers, units: Sequence[OffloadUnit]):
        self.gradients: GradientSum | None = None
        self._sharers, self._units = sharers, units
        self._last_in_backward: OffloadUnit | None = None
        self._not_agreed_on: OffloadUnit | None = None

    def on_fetch(self, unit: OffloadUnit, place: int, updates: Updates, ahead: bool) -> list[int] | None:
        """Returns the places of all sharers' slots, of which this one's is `place`.

        None if an update of the unit has not ended on one; an update counts that begins with this exchange. `ahead`:
        the unit is fetched ahead of its use.
        """
        name, exchanged = f"the fetch of {unit} {'ahead of its use' if ahead else 'for its use'}", None
        while exchanged is None:
            pending = ahead and updates.is_pending(unit)
            if not pending:
                # Before, because others may copy what this process updates.
                updates.before_onload(unit)
            had_begun = unit.has_begun_updates
            exchanged = self._exchange(name, unit.index, (int(ahead), int(pending), place))
        found, _ = exchanged
        is_ready = unit.has_begun_updates == had_begun and not any(pending for _, _, pending, *_ in found)
        return [place for _, _, _, place, *_ in found] if is_ready else None

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        """Takes the use of a unit in a step. Where it is another than the last one in backward, all sharers agree.

        So gradients are summed also where units that are still in their slots are not fetched again. All hosts come to
        this, while only the sharers of one host take part in a fetch. On one host a fetch before `on_use` will do.
        """
        if in_backward and unit is not self._last_in_backward:
            self._not_agreed_on = unit
            if self._sharers.hosts > 1:
                self.on_use()
        self._last_in_backward = unit if in_backward else None

    def on_use(self) -> None:
        """Agrees on the use that was noted last, unless the sharers have exchanged their gradients since."""
        unit, self._not_agreed_on = self._not_agreed_on, None
        if unit is not None:
            while self._exchange(f"the use of {unit} in backward", unit.index, everywhere=True) is None:
                pass

    def on_sums(self) -> None:
        """Sums the gradients that all sharers have now, between two fetches; over several hosts it does nothing.

        Not every sharer has to call it, or as often as another: the others repeat the exchange that they have come to.
        """
        if self._sharers.hosts == 1:
            self._exchange("a sum of gradients", SUMS_ALONE)

    def on_end(self) -> None:
        """Sums the gradients that all sharers have and have not summed yet; the others go home.

        Raises RuntimeError if a sharer fetches another unit in this step, which this one has ended.
        """
        exchanged = None
        # Until there was nothing left to sum.
        while exchanged is None or exchanged[1]:
            exchanged = self._exchange("the end of a step", END_OF_STEP, everywhere=True)
        self.gradients.give_up_rest()

    def _exchange(
        self, what: str, index: int, fetch: tuple[int, int, int] = (0, 0, 0), everywhere: bool = False
    ) -> tuple[list[list[int]], bool] | None:
        """Returns `index` and `fetch` of each sharer, and whether gradients were summed.

        `fetch`: whether it is ahead of the use, whether an update has not ended, and the place of the slot. None where
        a sharer came for sums alone: all is to be asked anew, as updates may have begun. `everywhere`: with all hosts.
        """
        sharers, own = self._sharers, [index, *fetch]
        sums = everywhere or sharers.hosts == 1
        # On one host there is one kind of exchange, so that a sharer at its end meets one that still fetches.
        everywhere = everywhere and sharers.hosts > 1
        found = sharers.exchange([*own, *self.gradients.offers()] if sums else own, what, everywhere=everywhere)
        for rank, theirs in enumerate(found, start=0 if everywhere else sharers.first):
            if SUMS_ALONE not in (index, theirs[0]) and theirs[:2] != own[:2]:
                raise RuntimeError(
                    f"rank {sharers.first + sharers.rank} has come to {what}, rank {rank} to {self._named(theirs[0])}:"
                    f" processes that share weights must use them in the same order; {OWN_HOMES}"
                )
        summed = sums and self.gradients.sum_common([theirs[len(own) :] for theirs in found])
        if any(theirs[0] == SUMS_ALONE for theirs in found):
            return None
        if sums:
            self._not_agreed_on = None
        return found, summed

    def _named(self, index: int) -> str:
        if index == END_OF_STEP:
            return "the end of a step"
        return f"the fetch of {self._units[index]}" if index < len(self._units) else "another exchange"
