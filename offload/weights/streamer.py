"""Streams weights: units live on the host, are on the device only while in use, and send their gradients home.

One mechanism serves every granularity. Around the forward of a module that uses a unit, a window is open: the module
holds device stand-ins of its parameters, and weights that autograd saves are saved by name (`saved_weights`). In
backward the saved names bring units back, and gradients leave as they are made (`landing`). Outside a step modules
hold their host parameters, so optimizers, checkpoints and `state_dict` need nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch

from offload.memory.device_slots import DeviceSlots
from offload.memory.host_memory import HostArena
from offload.streams.registry import Streams
from offload.streams.transfer import Counters, Telemetry, Transfer
from offload.torch_private.recomputed_blocks import arrived, leaving
from offload.torch_private.tensor_parts import lies_flat, version_of, wraps
from offload.weights.gradients.landing import GradientLanding
from offload.weights.gradients.offloader import gradient_ring_bytes
from offload.weights.gradients.seams import NO_UPDATES, Updates
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.prefetching.slot_contents import Filler, SlotContents
from offload.weights.units.partition import CutModel
from offload.weights.units.placement import DevicePlacement
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.user_changes import check_one_owner, check_what_trains, is_as_taken, take_changes
from offload.weights.windows.saved_weights import SavedWeights
from offload.weights.windows.stand_in import StandIns
from offload.weights.windows.windows import Windows

# Gradients that may wait on the device for the bus, in units of the largest unit.
GRADIENT_SLOTS = 2


class WeightStreamer:
    """A model whose units stream between the host and one device.

    Takes the model over on construction, and gives it back with `detach`, or after an error as it was found.
    `make_filler` makes what brings units home and into slots. Raises what that raises, and MemoryError before anything
    is allocated. `releases`: gradients go to updates inside backward, and have no homes (`ReleasedGradients`).
    """

    def __init__(
        self,
        cut: CutModel,
        streams: Streams,
        *,
        slots: int,
        prefetch: int,
        pin: bool = True,
        make_filler: Callable[[CutModel, Transfer, HostArena, int], Filler] = Filler,
        releases: bool = False,
    ):
        self.cut = cut
        self.telemetry = Telemetry(streams)
        self.transfer = Transfer(streams, self.telemetry)
        self.arena = HostArena(streams.device, pin)
        self._streams = streams
        self._updates: Updates = NO_UPDATES
        self._in_inference = False
        with ExitStack() as undo:
            undo.callback(self.arena.close)
            # Steps that may fail for lack of memory come before the model is touched.
            gradient_bytes = gradient_ring_bytes(cut.units) if releases else cut.gradient_bytes
            self.filler = make_filler(cut, self.transfer, self.arena, gradient_bytes)
            undo.callback(self.filler.close)
            self._has_gradient_homes = self.filler.has_gradient_homes and not releases
            self._slots = DeviceSlots(slots, self.filler.slot_bytes, streams, self.filler.allocate_slot)
            self._bring_home(undo, releases)
            self._join_parts(prefetch, releases)
            undo.pop_all()

    def _bring_home(self, undo: ExitStack, releases: bool) -> None:
        """Moves units to their homes and all other tensors to the device; `undo` puts them back."""
        for unit in self.cut.units:
            undo.callback(unit.put_back)
            self.filler.bring_home(unit)
            if self._has_gradient_homes:
                unit.make_gradient_homes(self.arena)
            leaving(unit.buffer_places)
            undo.callback(arrived, unit.buffer_places)
        self._placement = DevicePlacement(self.cut.resident, self._streams.device)
        undo.callback(self._placement.put_back)
        # The tensors as they were found would keep memory that nobody else needs.
        self.cut = replace(self.cut, resident=self._placement.held)

    def _join_parts(self, prefetch: int, releases: bool) -> None:
        """Makes the parts that land gradients, fill slots and open windows; each calls the one before."""
        cut, streams = self.cut, self._streams
        limit_bytes = GRADIENT_SLOTS * cut.largest_unit_bytes
        self.gradients = GradientLanding(
            cut.units,
            self.arena,
            self.transfer,
            limit_bytes=limit_bytes,
            releases=releases,
            sharers=self.filler.updaters,
        )
        contents = SlotContents(self._slots, self.transfer, not streams.asynchronous, self.filler)
        self.prefetcher = Prefetcher(cut.units, contents, self.transfer, prefetch, self.filler)
        self.gradients.copy_in = contents.unawaited_copy
        final = self.gradients.final
        self._stand_ins = StandIns(cut.units)
        saved = SavedWeights(self._slots, self._stand_ins, self.prefetcher, final)
        self._windows = Windows(
            cut, self._slots, self._stand_ins, self.prefetcher, saved, streams, sink=self.gradients, final=final
        )
        stays = [tensor for tensor, _ in cut.resident if tensor.requires_grad and not wraps(tensor)]
        self.filler.join(self.gradients, stays)

    def use_updates(self, updates: Updates) -> None:
        """Calls `updates` at the points of a step from now on; `detach` closes it."""
        self._updates = self.filler.updates = updates
        self.gradients.use_updates(updates)

    def weights_now(self) -> list[tuple]:
        """Returns what changes where a forward, or code around it, changes a weight or freezes it, but for updates."""
        pending = self._updates.is_pending
        units = [unit for unit in self.cut.units if not pending(unit)]
        streamed = [each for unit in units for each in self._stand_ins[unit] if not each.tensor.is_buffer]
        resident = [tensor for tensor, attributes in self.cut.resident if not attributes[0].is_buffer]
        return [(each.state, each.tensor.trains) for each in streamed] + [
            (version_of(tensor), tensor.requires_grad, tensor.data_ptr() if lies_flat(tensor) else None)
            for tensor in resident
        ]

    # A step: begin, windows, landing, end.

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """Surrounds the forward and backward passes of one step, of any number of microbatches. `norms`: take norms.

        Afterwards gradients are readable on the host and no copy is in flight, also after an exception. Raises
        RuntimeError where updates of the last step have begun and it was not ended, for a parameter that was moved, or
        was frozen until now, and where more than the update needs a gradient that is released.
        """
        self._take_changes()
        self._updates.begin_step()
        self.gradients.begin_step(norms)
        try:
            self.prefetcher.begin_step()
            self._windows.begin(in_step=True)
            # Autograd would run the nodes of the device in another thread than those of the parameters, which are on
            # the host: two threads that wait for Python's lock, and for each other, at every gradient.
            with torch.autograd.set_multithreading_enabled(False):
                yield
            self.filler.end_uses()
        except BaseException:
            self.filler.abandon_step()
            self._updates.abandon_step()
            raise
        finally:
            self._end_step()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Surrounds forwards without gradients, between which no weight changes: slots keep their units.

        The first units of the next forward come in while this one ends. Raises RuntimeError for a parameter that was
        moved, or changed inside, where its version counter shows that.
        """
        self._take_changes()
        self._in_inference = True
        try:
            self.prefetcher.begin_inference()
            self._windows.begin(in_step=False)
            yield
            self.prefetcher.promised.check([*self.prefetcher.promised])
        finally:
            self._in_inference = False
            self._windows.end()
            self.prefetcher.release_for_host_writes()

    def _take_changes(self) -> None:
        """Takes over what the user has changed since the last step. Raises RuntimeError for what cannot be streamed."""
        # The device waits for the host here: this looks at what is as it was, which as a rule is everything, only once.
        changed = {unit for unit in self.cut.units if not is_as_taken(unit)}
        if changed:
            check_one_owner(self.cut.units)
        for unit in self.cut.units:
            if unit in changed:
                self.filler.check_changes(unit)
                take_changes(unit, self.arena, functools.partial(self._end_updates, unit))
            check_what_trains(unit)
            if self._has_gradient_homes:
                for tensor in unit.trained:
                    if tensor.gradient.memory is None:
                        # It was frozen when the mode was attached.
                        tensor.gradient.make_memory(self.arena)

    def _end_updates(self, unit: OffloadUnit) -> None:
        self._updates.before_onload(unit)
        # Of states on the device, new weights may still be on their way.
        self._streams.synchronize()

    def _end_step(self) -> None:
        self.gradients.end_backward()
        self._windows.end()
        self.prefetcher.end_step()
        self.filler.end_step()
        # While the last gradients are on their way home.
        self.telemetry.collect()
        self.gradients.settle()
        self._updates.end_step()
        for unit in self.cut.units:
            if not self._updates.is_pending(unit):
                self._streams.writes(None, unit.weights, "the optimizer's update")

    # Before and after all steps.

    def check_weights_may_change(self) -> None:
        """Raises RuntimeError inside `inference`, where the weights stay as they are."""
        if self._in_inference:
            where = "inside attached.inference(), where weights stay as they are"
            raise RuntimeError(f"optimizer.step() {where}: end it first")

    def detach(self) -> None:
        """Gives the model back: its own forwards, tensors where they were found (host memory for meta tensors).

        Those with a home in a file stay views of it, copied on write. At its end raises an error of updates that is
        new.
        """
        try:
            self._updates.close()
        finally:
            self._give_back()

    def _give_back(self) -> None:
        self._windows.remove()
        self.gradients.close()
        # They refer back to this object: without them the device memory goes with its last reference.
        self._windows = None
        self.prefetcher.evict_all()
        self._streams.synchronize()
        self.use_updates(NO_UPDATES)
        for slot in self._slots:
            self._streams.writes(None, slot, "the allocator's next owner")
        for unit in self.cut.units:
            self._streams.writes(None, unit.weights, "the model's owner")
            unit.restore()
            arrived(unit.buffer_places)
        self._placement.restore()
        self.filler.close()
        self.arena.close()

    def counters(self) -> Counters:
        """Counts copies and updates since construction, and the host memory of the units now."""
        # Waits of forwards between steps count, too.
        self.telemetry.collect()
        copies = Counters(
            h2d_bytes=self.telemetry.h2d_bytes,
            d2h_bytes=self.telemetry.d2h_bytes,
            stall_ms=self.telemetry.stall_ms,
            update_wait_ms=self.gradients.wait_ms,
        )
        return copies + self.filler.counters() + self._updates.counters()
