"""Sums gradients over the sharers of a model's homes, on the devices, while backward goes on.

Once all gradients of a unit are there, on every sharer, they are copied into a flat buffer, the buffers are summed, and
each sharer sends its slices of the sum home: it updates these and no others. So every gradient crosses the link to the
host once, divided among the sharers, where ZeRO-2 (Rajbhandari et al. 2020) divides them as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload.sharing.device_sums import NOTHING, SUMS_AT_ONCE, DeviceSums, offer
from offload.sharing.links import Addends, Links
from offload.sharing.sharers import OWN_HOMES, Sharers
from offload.sharing.sum_memory import SumHome, SumLayout, SumRing
from offload.streams.registry import Event, Points, Streams
from offload.streams.transfer import DeferredFrees, PendingFree, Transfer, profiled
from offload.weights.gradients.landing import GradientLanding
from offload.weights.gradients.offloader import l2_norm
from offload.weights.gradients.seams import Destination
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Units whose gradients may wait for those of the sharers. Beyond that the oldest goes home, to be summed after it.
WAITING_UNITS = 4


class _UnitGradients:
    """The gradients of a unit, as they land, and where they are to lie.

    `kept` has memory for what the device updates of their sums. `complete` marks where all are there, and that memory.
    """

    def __init__(self, layout: SumLayout, streams: Streams):
        self.layout = layout
        self.landed: dict[UnitTensor, PendingFree] = {}
        self.kept: dict[UnitTensor, PendingFree] = {}
        self.complete = Points(streams)

    @property
    def is_complete(self) -> bool:
        return len(self.landed) == len(self.layout.tensors)


class GradientSum(Destination):
    """The gradients of this process that are to be summed over `sharers`.

    A unit is summed inside backward when all sharers have all of its gradients: they tell each other with the fetches
    (`GatherFiller`). A unit of which a sharer lacks one (of an expert without tokens) goes home alone, as do those
    beyond WAITING_UNITS: the caller sums them. Where gradients are final on all sharers, updates may begin behind a
    sum. `homes` are those of the sums, `on_device` has the gradients of what stays on the device.
    """

    takes_gradients = True

    def __init__(
        self,
        sharers: Sharers,
        links: Links,
        ring: SumRing,
        homes: Mapping[OffloadUnit, SumHome],
        on_device: DeviceSums,
        transfer: Transfer,
        landing: GradientLanding,
    ):
        super().__init__()
        self.on_device = on_device
        self._summed: set[UnitTensor] = set()
        self._sharers = sharers
        self._links, self._ring = links, ring
        self._homes, self._units = homes, list(homes)
        self._landing = landing
        self._transfer = transfer
        self._streams = transfer.streams
        # Of gradients, which are added: that is over soon.
        self._added_frees = DeferredFrees(transfer, landing.limit_bytes // 2)
        self._takes_norms = False
        # Gradients that land are final.
        self._are_final = False
        self._held: dict[OffloadUnit, _UnitGradients] = {}

    def begin_step(self, norms: bool) -> None:
        self._takes_norms = norms
        self._summed.clear()
        self.on_device.begin_step()

    def last_microbatch(self) -> None:
        self._are_final = True
        self.on_device.last_microbatch()

    def take(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> bool:
        homes = self._homes[unit]
        if tensor not in homes.offsets:
            raise RuntimeError(
                f"{tensor.name} trains, and was frozen when processes began to share its unit: unfreeze it before the"
                f" mode is attached; {OWN_HOMES}"
            )
        grad = tensor.host.grad
        if grad is not None and grad is homes.gradients.get(tensor) and tensor not in self._summed:
            raise RuntimeError(
                f"the gradient of {tensor.name} is a sum over several processes, which nothing more is added to: set it"
                " to None before the next step (optimizer.zero_grad)"
            )
        takes = self._is_summed(unit, tensor) or (self._are_final and tensor.host.grad is None)
        if takes:
            self.land(unit, tensor, gradient)
        return takes

    def land(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> None:
        """Takes a gradient of the last microbatch, or a further piece of it.

        Raises RuntimeError if a sum without it has been made.
        """
        if tensor in self._summed:
            raise RuntimeError(
                f"a gradient of {tensor.name} came after the last that was expected: the sharers have summed it."
                " Reentrant checkpoints around layers that are used twice need use_reentrant=False"
            )
        streams = self._streams
        if unit not in self._held:
            if len(self._held) >= WAITING_UNITS:
                self._give_up(next(iter(self._held)))
            self._held[unit] = _UnitGradients(self._homes[unit].layout(), streams)
        held = self._held[unit]
        landed = held.landed
        if tensor in landed:
            # In memory of its own: what backward has made may be the gradient of another weight as well.
            with torch.no_grad():
                gradient = landed[tensor].tensor + gradient
        name = f"device gradient of {tensor.name}"
        landed[tensor] = PendingFree(gradient, streams.event(), name, streams.compute)
        streams.writes(streams.compute, landed[tensor], "backward")
        held.complete.note()
        if held.is_complete:
            held.kept = held.kept or self._room_for_updates(unit, held.layout)
            held.complete.record()

    def check_host_use(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        if self._is_summed(unit, tensor):
            raise RuntimeError(
                f"a loss uses {tensor.name} in host memory, besides the forward that has it on the device: processes"
                f" that share it sum its gradient without that; {OWN_HOMES}"
            )

    def _is_summed(self, unit: OffloadUnit, tensor: UnitTensor) -> bool:
        """Tells whether a gradient is summed, or it or a piece of it waits for those of the sharers."""
        return tensor in self._summed or (unit in self._held and tensor in self._held[unit].landed)

    def offers(self) -> tuple[int, ...]:
        """Returns the units whose gradients are all there, the oldest first, and whether final; then the buckets.

        The sharers exchange these numbers, and give those of all to `sum_common`.
        """
        trusts = self._landing.final.trusts
        units = [2 * unit.index + trusts(unit) for unit, held in self._held.items() if held.is_complete]
        return *offer(units), *self.on_device.offers()

    def sum_common(self, offers: Sequence[Sequence[int]]) -> bool:
        """Queues the sums of what all sharers have offered, and the copies of own slices of units home; True if any.

        `offers` has those of each sharer. The order is that of the first, and so the same on all.
        """
        of_units = [theirs[:SUMS_AT_ONCE] for theirs in offers]
        finals = [{number // 2: number % 2 for number in theirs if number != NOTHING} for theirs in of_units]
        common = [index for index in finals[0] if all(index in theirs for theirs in finals)]
        for index in common:
            unit = self._units[index]
            self._sum(unit, self._held.pop(unit))
            # All sharers begin updates early or none: one that still needed the weights would gather new slices.
            if self._landing.released is None and all(theirs[index] for theirs in finals):
                self.updates.gradients_landed(unit, unit.trained, after=self._landing.copy_in(unit))
        return self.on_device.sum_common([theirs[SUMS_AT_ONCE:] for theirs in offers]) or bool(common)

    def give_up_rest(self) -> None:
        """Sends home what the sharers have not summed, at the end of a step."""
        for unit in list(self._held):
            self._give_up(unit)

    def end_backward(self) -> None:
        self._are_final = False
        # After an error: what waits for the sharers.
        self._held.clear()
        self.on_device.end_step()

    def release(self) -> None:
        self._added_frees.release()

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        return frozenset(tensor.host for tensor in self._summed) | self.on_device.summed

    def known_norms(self, norms: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        summed = self.summed_parameters()
        return {parameter: norm for parameter, norm in norms.items() if parameter in summed}

    def close(self) -> None:
        self.on_device.close()

    def _give_up(self, unit: OffloadUnit) -> None:
        held = self._held.pop(unit)
        for tensor, gradient in held.landed.items():
            self._landing.land_at_home(unit, tensor, gradient.tensor, is_final=False)

    def _sum(self, unit: OffloadUnit, held: _UnitGradients) -> None:
        streams = self._streams
        gather, d2h = streams.gather, streams.d2h
        buffers = self._ring.take(held.layout.sizes, f"device gradients of {unit}")
        views = held.layout.views([buffer.tensor for buffer in buffers])
        gradients = [held.landed[tensor] for tensor in views]
        # Not for what compute was given since: the host may be far ahead of it.
        held.complete.hold_up(gather)
        with profiled(f"sum gradients of {unit}"), streams.on(gather), torch.no_grad():
            for gradient in gradients:
                streams.reads(gather, gradient, "sum")
            for number, (buffer, in_slices) in enumerate(zip(buffers, held.layout.in_slices, strict=True)):
                streams.writes(gather, buffer, "sum")
                tensors = [tensor for tensor, (place, _) in held.layout.places.items() if place == number]
                given = [held.landed[tensor].tensor for tensor in tensors]
                addends = Addends(buffer.tensor, [views[tensor] for tensor in tensors], given)
                # A norm is that of the whole sum.
                self._links.sum(addends, f"the gradients of {unit}", in_slices and not self._takes_norms)
            added = streams.event()
            added.record(gather)
            for tensor, view in views.items():
                tensor.gradient.norm = l2_norm(view) if self._takes_norms else None
                if tensor in held.kept:
                    streams.writes(gather, held.kept[tensor], "sum")
                    own = [view.view(-1)[part.start : part.stop] for part in held.layout.own[tensor]]
                    torch.cat(own or [view.new_empty(0)], out=held.kept[tensor].tensor)
        for tensor, gradient in held.kept.items():
            self.updates.retain_gradient(unit, tensor, gradient)
        summed = streams.event()
        summed.record(gather)
        parts = [(buffer, part) for buffer, own in zip(buffers, held.layout.parts, strict=True) for part in own]
        # Ends the copies of this process, whose slices are all that it updates.
        done = streams.event() if parts else summed
        d2h.wait_event(summed)
        for buffer, part in parts:
            streams.reads(d2h, buffer, "copy out")
            for tensor in part.tensors:
                streams.writes(d2h, tensor.gradient, "copy out")
            self._transfer.copy_out(part.home, buffer.tensor[part.place], done=done, what=f"gradients of {unit}")
        if self._landing.released is not None:
            done = self._release(unit, held, buffers, summed)
        for buffer in buffers:
            buffer.done = done
        for gradient in gradients:
            gradient.done = added
        self._added_frees.add(*gradients)
        for tensor in views:
            if self._landing.released is not None:
                self._summed.add(tensor)
                continue
            home = self._homes[unit].gradients[tensor]
            tensor.gradient.lands(tensor.host, home, done)
            self._summed.add(tensor)

    def _release(self, unit: OffloadUnit, held: _UnitGradients, buffers: Sequence[PendingFree], summed: Event) -> Event:
        """Sends this process's slices of a sum to their updates. Returns the end of the last copy."""
        streams, after = self._streams, self._landing.copy_in(unit)
        for tensor, (number, start) in held.layout.places.items():
            tensor.gradient.is_released, tensor.gradient.landed_in = True, None
            if tensor in held.kept:
                self.updates.gradients_landed(unit, [tensor], after, held.kept[tensor])
                continue
            # One that begins and ends in a slice of another process is claimed, and counted, as all are.
            part = next(iter(held.layout.own[tensor]), range(0))
            own = buffers[number].tensor[start + part.start : start + part.stop]
            streams.reads(streams.d2h, buffers[number], "copy out")
            leaving = PendingFree(own, streams.event(), f"sum of the gradients of {tensor.name}", streams.gather)
            self._landing.released.send(unit, tensor, leaving, self.updates, after, part)
            summed = leaving.done
        return summed

    def _room_for_updates(self, unit: OffloadUnit, layout: SumLayout) -> dict[UnitTensor, PendingFree]:
        """Returns memory for this process's slices of each sum, one behind the other, where the device updates."""
        if not self.updates.keeps_gradients(unit):
            return {}
        streams, found = self._streams, {}
        for tensor, own in layout.own.items():
            room = torch.empty(sum(map(len, own)), dtype=tensor.dtype, device=streams.device)
            name = f"device gradient of {tensor.name}"
            found[tensor] = PendingFree(room, streams.event(), name, streams.compute)
            streams.writes(streams.compute, found[tensor], "what this memory was used for before")
        return found
