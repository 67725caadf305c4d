"""Weight streaming: units live on the host, visit the device while they are used, and send their gradients home.

One mechanism at every granularity. Around the forward of a module that uses a unit, a window is open: the module
holds device stand-ins of its parameters, and the weights that autograd saves are saved by name (`saved_weights`).
In backward the saved names bring units back, and gradients leave as they are made (`gradients`). Outside a step the
module holds its host parameters, so optimizers, checkpoints and `state_dict` need nothing new.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.utils.hooks import RemovableHandle

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.device_states import DeviceStates
from offload.optimizer.visiting_states import VisitingStates
from offload.optimizer.worker import UpdateWorker
from offload.runtime.counters import Counters
from offload.runtime.device_slots import DeviceSlot, DeviceSlots
from offload.runtime.host_memory import HostArena
from offload.runtime.module_contexts import WrappedForward
from offload.runtime.registry import Event, Streams
from offload.runtime.transfer import Telemetry, Transfer
from offload.weights.gradients import FinalGradients, GradientOffloader
from offload.weights.partition import CutModel, Window
from offload.weights.prefetcher import Prefetcher
from offload.weights.saved_weights import SavedWeights
from offload.weights.units import DevicePlacement, OffloadUnit, UnitTensor

# Cores that updates leave to others: backward's thread, the one that launches, and the copies', while these are busy.
BUSY_CORES = 3
LAUNCHING_CORES = 1

# Gradients that may wait on the device for the bus, in units of the largest unit.
GRADIENT_SLOTS = 2


class WeightStreamer:
    """A model whose units stream between the host and one device.

    Takes the model over on construction and gives it back with `detach`. Raises MemoryError, before anything is
    allocated, where the host has no room for the units.
    """

    def __init__(
        self,
        cut: CutModel,
        streams: Streams,
        *,
        slots: int,
        prefetch: int,
        pin: bool = True,
    ):
        self.telemetry = Telemetry(streams)
        self._streams = streams
        self._cut = cut
        self.arena = HostArena(streams.device, pin)
        # What may fail for lack of memory comes before the model is touched.
        self.arena.require(cut.unit_bytes + cut.gradient_bytes)
        self._slots = DeviceSlots(slots, cut.largest_unit_bytes, streams)
        for unit in cut.units:
            unit.bring_home(self.arena)
        self._placement = DevicePlacement(cut.resident, streams.device)
        self.transfer = Transfer(streams, self.telemetry)
        self._prefetcher = Prefetcher(cut.units, self._slots, self.transfer, prefetch, poison=not streams.asynchronous)
        self._gradients = GradientOffloader(self.transfer, GRADIENT_SLOTS * cut.largest_unit_bytes)
        self._final = FinalGradients()
        self._saved = SavedWeights(self._slots, self._prefetcher, self._final.use)
        self.updates: UpdateWorker | None = None
        self._share: DeviceStates | None = None
        self._visits: VisitingStates | None = None
        self._optimizer: HostAdamW | None = None
        self._update_early = False
        self._hooks: list[RemovableHandle] = []
        self._in_step = False
        self._windowed = [
            WrappedForward(window.module, functools.partial(self.window, window)) for window in cut.windows
        ]

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """Around the forward and backward passes of one step, of one or of several microbatches.

        `norms`: those of the gradients are wanted (`gradient_norms`).
        Afterwards gradients are readable on the host and nothing is in flight; that holds after an exception too.
        Raises RuntimeError when a step is open already, when the last one's updates have begun inside backward and
        the optimizer has not ended it, and for a parameter that was moved, or frozen until now.
        """
        if self._in_step:
            raise RuntimeError("a step is open already: close it before the next")
        if self._optimizer is not None and self._optimizer.has_begun:
            raise RuntimeError(
                "updates of the last step have begun: end it with optimizer.step() or optimizer.skip(), which leaves"
                " out those that have not; to accumulate over steps, let updates begin after backward (early=False)"
            )
        for unit in self._cut.units:
            unit.check_home()
        self._in_step = True
        try:
            self._begin_step(norms)
            yield
        finally:
            self._in_step = False
            self._final.end_step()
            for unit in self._cut.units:
                unit.drop_stand_ins()
            self._prefetcher.end_step()
            self._settle()
            self.telemetry.collect()

    def overlap(self, optimizer: HostAdamW, early: bool, device_share: int = 0) -> None:
        """Has `optimizer` update the units on a thread of its own, from now on; its states are not made yet.

        `device_share` is how many bytes of states live on the device, where their units are updated. Of the others,
        `optimizer.visiting_share` visit it to be updated.
        `early`: a unit's update may begin when its gradients of the last microbatch have landed, if in the step before
        each landed there once; else the optimizer's `step` starts it. A change to settings, a learning rate set by hand
        between backward and that `step`, then comes too late for what has begun. `state_dict` and `load_state_dict` of
        the model wait for the updates.
        """
        self.updates = UpdateWorker(optimizer, self._streams, self._prefetcher.first_use)
        self._update_early = early
        self._prefetcher.updates = self.updates
        self._optimizer = optimizer
        optimizer.leave_cores(BUSY_CORES if early else LAUNCHING_CORES)
        self.place_states(device_share)
        others = [unit for unit in self._cut.units if unit not in self._share.units]
        self._visits = VisitingStates(others, optimizer, self.transfer, self.arena, optimizer.visiting_share)
        optimizer.defer_to(self)
        # A function of its own: a deepcopy of the model leaves it as it is, and would copy what a method is bound to.
        for window in self._cut.windows:
            for register in (
                window.module.register_state_dict_pre_hook,
                window.module.register_load_state_dict_pre_hook,
            ):
                self._hooks.append(register(lambda *_: self.finish()))

    def place_states(self, nbytes: int) -> None:
        """Between steps: the states of the first units that fit into `nbytes` live on the device from now on."""
        self.finish()
        limit_bytes = GRADIENT_SLOTS * self._cut.largest_unit_bytes
        self._share = DeviceStates(self._cut.units, self._optimizer, self.transfer, nbytes, limit_bytes)
        if self._visits is not None:
            self._visits.leave(self._share.units)

    def offer_all(self, scale: float) -> None:
        """Starts the update of every unit that has gradients and was not updated in this step."""
        for unit in sorted(self._cut.units, key=self._prefetcher.first_use):
            self._update(unit, unit.trained, scale)

    def _update(
        self, unit: OffloadUnit, tensors: Sequence[UnitTensor], scale: float = 1.0, after: Sequence[Event] = ()
    ) -> None:
        on_device = (updates for updates in (self._share, self._visits) if unit in updates.units)
        next(on_device, self.updates).offer(unit, tensors, scale, after)

    def finish(self) -> None:
        """Waits for the updates that are under way; afterwards the weights at home are final."""
        if self.updates is not None:
            self.updates.finish()
        for unit in self._cut.units:
            if unit.updated is not None:
                unit.updated.synchronize()
                unit.updated = None

    def gradient_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """L2 norms of the gradients of the last step, if they were wanted: float32 scalars on the device.

        Those that a hook or the caller has changed since they landed are left out.
        """
        normed = (tensor for unit in self._cut.units for tensor in unit.tensors if tensor.norm is not None)
        return {tensor.host: tensor.norm for tensor in normed if tensor.has_landed_gradient}

    def last_microbatch(self) -> None:
        """The gradients that land from now on in this step are final."""
        self._final.counting = self._update_early

    def _begin_step(self, norms: bool) -> None:
        self._final.begin_step(self._cut.units)
        self._gradients.takes_norms = norms
        if self._share is not None:
            self._share.drop()
        for unit in self._cut.units:
            for tensor in unit.tensors:
                tensor.norm = None
            if unit.updated is None and (self.updates is None or not self.updates.is_pending(unit)):
                self._streams.writes(None, unit.weights, "the optimizer's update")
        self._prefetcher.begin_step()

    def detach(self) -> None:
        """Gives the model back: its own forwards, tensors where they were found (host memory for meta ones)."""
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        if self.updates is not None:
            self.updates.close()
        for windowed in self._windowed:
            windowed.remove()
        for hook in self._hooks:
            hook.remove()
        # They refer back to this object: without them the device memory goes with its last reference.
        self._windowed.clear()
        self._hooks.clear()
        self._optimizer = self._share = self._visits = None
        self._prefetcher.drop()
        self._streams.synchronize()
        for slot in self._slots:
            self._streams.writes(None, slot, "the allocator's next owner")
        for unit in self._cut.units:
            self._streams.writes(None, unit.weights, "the model's owner")
        self._placement.restore()
        self.arena.close()

    def counters(self) -> Counters:
        """Counts copies and updates since construction, and the host memory of the units now."""
        copies = Counters(
            h2d_bytes=self.telemetry.h2d_bytes,
            d2h_bytes=self.telemetry.d2h_bytes,
            stall_ms=self.telemetry.stall_ms,
            host_pinned_bytes=self.arena.pinned_bytes,
            host_pageable_bytes=self.arena.pageable_bytes,
        )
        return copies if self.updates is None else copies + self.updates.counters()

    @contextmanager
    def window(self, window: Window) -> Iterator[None]:
        """The window's units are on the device, installed in their modules, for the length of the block."""
        if torch.is_grad_enabled() and not self._in_step and self._trains(window):
            raise RuntimeError(
                "forward with gradients outside a step: wrap forward and backward in `with mode.step():`,"
                " or evaluation in torch.no_grad()"
            )
        opened = []
        try:
            for unit in window.units:
                slot = self._prefetcher.visit(unit, in_window=True)
                opened.append(unit)
                if unit.open_windows == 1:
                    for tensor in unit.tensors:
                        tensor.install(self._stand_in(unit, tensor, slot))
            for unit, tensor in window.read:
                self._final.use(unit, tensor)
            with self._saved.hooks():
                yield
        finally:
            self._close_units(opened)

    def _close_units(self, units: Iterable[OffloadUnit]) -> None:
        for unit in units:
            unit.open_windows -= 1
            if unit.open_windows:
                continue
            self._write_back(unit)
            for tensor in unit.tensors:
                tensor.install(tensor.host)
            if not self._in_step:
                # Between steps the weights at home may change at any time: nothing of them is kept.
                self._prefetcher.forget(unit)
                unit.drop_stand_ins()

    @staticmethod
    def _trains(window: Window) -> bool:
        return any(unit.trained for unit in window.units)

    def _stand_in(self, unit: OffloadUnit, tensor: UnitTensor, slot: DeviceSlot) -> torch.Tensor:
        with torch.inference_mode(False):
            # `.data` has a version counter of its own, which tells whether forward updated a buffer.
            view = tensor.view_of(slot.bytes).data
            if tensor.is_buffer:
                tensor.device = view
            elif tensor.device is not None:
                # One leaf a step: autograd sums the gradients of all its uses before they leave, as it would for a
                # resident parameter.
                tensor.device.data = view
            else:
                tensor.device = nn.Parameter(view, requires_grad=tensor.trains)
                if tensor.trains:
                    for hook in (tensor.host._backward_hooks or {}).values():
                        tensor.device.register_hook(hook)
                    tensor.device.register_post_accumulate_grad_hook(functools.partial(self._land, unit, tensor))
        return tensor.device

    def _write_back(self, unit: OffloadUnit) -> None:
        updated = []
        for tensor in unit.tensors:
            if not tensor.is_buffer:
                continue
            place = tensor.places[0]
            replaced = place.held is not tensor.device
            if replaced:
                tensor.device.copy_(place.held)
            # Running statistics are updated by kernels that do not declare it: no version counter tells.
            counts = isinstance(place.module, _NormBase) and place.module.training
            if replaced or counts or tensor.device._version:
                updated.append(tensor)
        if updated:
            self._prefetcher.write_home(unit, updated)

    def _land(self, unit: OffloadUnit, tensor: UnitTensor, leaf: nn.Parameter) -> None:
        is_final = self._final.land(unit, tensor)
        held = self._share is not None and unit in self._share.units
        self._gradients.land(tensor, leaf, self._share.hold if held else None)
        tensor.landed_version = tensor.gradient._version
        hooks = (tensor.host._post_accumulate_grad_hooks or {}).values()
        if hooks or not self._in_step:
            self._settle()
        for hook in hooks:
            hook(tensor.host)
        if is_final:
            # Fetched ahead for a use that did not come, it is still being read.
            self._update(unit, [tensor], after=self._prefetcher.unread(unit))

    def _settle(self) -> None:
        self._gradients.release()
        # Not only the gradients: a unit fetched ahead and not used is still being read at home.
        self._streams.synchronize()
        for unit in self._cut.units:
            unit.updated = None
            for tensor in unit.trained:
                self._streams.reads(None, tensor, "the optimizer's update")
