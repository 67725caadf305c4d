"""Updates a model's units while its steps run: on a worker thread of the host, or on the device.

A unit's update begins inside backward when its gradients are final (`early`), or else in `optimizer.step`, and may last
into the next forward. Streaming waits for it before the unit is copied in again, and for nothing else.

A device updates thirty times as fast as its host, so states that fit there (`DeviceStates`) take work off the host:
those of the units that the next forward needs first, whose gradients land last.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import torch
from torch import Tensor

from offload.optimizer.adamw import BEGUN, HostAdamW
from offload.optimizer.claims import Claim
from offload.optimizer.kernels import torch_threads
from offload.optimizer.states import some_elements
from offload.optimizer.worker import UnitUpdate, UpdateWorker
from offload.streams.registry import Event, Signal
from offload.streams.transfer import Counters, DeferredFrees, PendingFree, Transfer
from offload.torch_private.module_contexts import OwnHook
from offload.weights.gradients.offloader import RingBlock
from offload.weights.gradients.seams import Updates
from offload.weights.streamer import WeightStreamer
from offload.weights.units.unit import OffloadUnit, UnitTensor

# Cores that updates leave to others: backward's thread, the one that launches, and the copies', while these are busy.
BUSY_CORES = 3
LAUNCHING_CORES = 1


class Overlap(Updates):
    """Updates by `optimizer`, for the units of `streamer`, until `close`.

    `device_share`: bytes of states that live on the device, whose units are updated there, all others on the worker.
    `early`: a unit's update may begin when its gradients of the last microbatch have landed, if in the step before each
    landed there once; a change to settings before `step` then comes too late. `state_dict` and `load_state_dict` of
    model and optimizer wait for the updates. Raises RuntimeError for an optimizer that another overlap has.
    """

    def __init__(self, optimizer: HostAdamW, streamer: WeightStreamer, early: bool, device_share: int = 0):
        if optimizer.deferral is not None:
            raise RuntimeError(
                "a mode makes the updates of this optimizer already: give each model that is attached an optimizer of"
                " its own, or detach the other mode first"
            )
        self.early = early
        self._optimizer = optimizer
        self._streamer = streamer
        self._units = streamer.cut.units
        self._order = streamer.prefetcher.access_order
        self._worker = UpdateWorker(streamer.transfer.streams)
        # At exit, too: a process that ends would stop the thread inside an update, and abort.
        weakref.finalize(self, self._worker.close)
        optimizer.leave_cores(BUSY_CORES if self.early else LAUNCHING_CORES)
        self._device = self._placed(device_share)
        self._hooks = [
            OwnHook(window.module, register, lambda *_: self.finish())
            for window in streamer.cut.windows
            for register in (
                window.module.register_state_dict_pre_hook,
                window.module.register_load_state_dict_pre_hook,
            )
        ]
        optimizer.deferral = self

    def place_states(self, nbytes: int) -> None:
        """Keeps the states of the first units that fit into `nbytes` on the device from now on; between steps."""
        self.finish()
        self._device = self._placed(nbytes)

    # Called by the optimizer.

    def offer_all(self, scale: float) -> None:
        """Starts the update of every unit that has gradients and was not updated in this step.

        Raises RuntimeError inside `Attached.inference`, and for a scale where updates have begun without it.
        """
        self._streamer.check_weights_may_change()
        if scale != 1.0 and self._optimizer.has_begun:
            raise RuntimeError(f"step(scale={scale:g}): {BEGUN}")
        # Those of a `step` just before, without a step of the mode between: what `step` itself updates may be theirs.
        self._device.finish()
        self._device.notice_writes()
        # The worker's first: it takes the longest, and to queue those of the device takes the host's time.
        for unit in sorted(
            self._units, key=lambda unit: (self.keeps_gradients(unit), self._order.first_use(unit.index))
        ):
            self._offer(unit, unit.trained, scale)

    def skip(self) -> None:
        """Leaves the updates that have begun."""

    def follow(self, act: Callable[[Iterable[Tensor]], None]) -> set[Tensor]:
        """Queues, behind the updates of each unit, a call of `act` with what trains of it; see `HostAdamW.follow`."""
        followed = {unit: [tensor.host for tensor in unit.trained] for unit in self._units}

        def make(parameters: list[Tensor]) -> int:
            with torch_threads(self._optimizer.threads):
                act(parameters)
            return 0

        for unit, parameters in followed.items():
            self._queue(unit, (), self._device.ends_of_updates(unit), partial(make, parameters))
        return {parameter for parameters in followed.values() for parameter in parameters}

    def finish(self) -> None:
        """Waits for the updates that are under way; afterwards the weights at home are final."""
        self._worker.finish()
        self._device.finish()

    # Called by the streamer; see `Updates`.

    def begin_step(self) -> None:
        """Raises RuntimeError where updates of the last step have begun, and frees gradients that it left unused."""
        for unit in self._units:
            unit.has_begun_updates = False
        if self._optimizer.has_begun:
            raise RuntimeError(
                "updates of the last step have begun: end it with optimizer.step() or optimizer.skip(), which leaves"
                " out those that have not; to accumulate over steps, let updates begin after backward (early=False)"
            )
        self._device.begin_step()

    def before_onload(self, unit: OffloadUnit) -> None:
        """Blocks the host for the worker's updates of the unit; h2d waits for those on the device."""
        self._worker.wait(unit)
        self._device.before_onload(unit)

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Tells whether the worker has updates of the unit left."""
        return self._worker.is_pending(unit)

    def keeps_gradients(self, unit: OffloadUnit) -> bool:
        """Tells whether the unit is updated on the device."""
        return unit in self._device.units

    def retain_gradient(self, unit: OffloadUnit, tensor: UnitTensor, gradient: PendingFree) -> bool:
        """Keeps on the device the gradients that update states there."""
        if not self._device.updates(tensor):
            return False
        self._device.retain(tensor, gradient)
        return True

    def gradients_landed(
        self,
        unit: OffloadUnit,
        tensors: Sequence[UnitTensor],
        after: Sequence[Event],
        released: RingBlock | PendingFree | None = None,
    ) -> Signal | None:
        """Starts the updates by final gradients. Returns what is set when the worker has read a released one."""
        unit.has_begun_updates = True
        if isinstance(released, RingBlock):
            parameter = tensors[0].host
            claims = self._optimizer.claim([parameter], {parameter: released.tensor})
            return self._queue(unit, tensors, after, partial(self._apply, claims), [released]) if claims else None
        self._offer(unit, tensors, after=after)
        return None

    def end_step(self) -> None:
        """Forgets the ends of updates on the device, which are past."""
        self._device.end_step()

    def counters(self) -> Counters:
        """Returns the worker's totals: ms of updates, ms that the host waited for them, and parameters updated."""
        return self._worker.counters()

    def close(self) -> None:
        """Makes the updates that were offered, and gives the optimizer and the model back.

        At its end raises an error that nobody has got yet.
        """
        self._worker.close()
        self._device.finish()
        self._optimizer.deferral = None
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._worker.raise_new_error()

    def _offer(
        self, unit: OffloadUnit, tensors: Sequence[UnitTensor], scale: float = 1.0, after: Sequence[Event] = ()
    ) -> None:
        if self.keeps_gradients(unit):
            self._device.offer(unit, tensors, scale, after)
        elif claims := self._optimizer.claim([tensor.host for tensor in tensors]):
            self._queue(unit, tensors, after, partial(self._apply, claims, scale))

    def _queue(
        self,
        unit: OffloadUnit,
        tensors: Sequence[UnitTensor],
        after: Sequence[Event],
        make: Callable[[], int],
        read: Sequence[RingBlock] | None = None,
    ) -> Signal:
        """Has the worker make an update of these tensors when their gradients have landed and `after` is past."""
        slots = [tensor.gradient for tensor in tensors]
        landed = [slot.landed for slot in slots if slot.landed is not None]
        return self._worker.offer(
            UnitUpdate(unit, read or slots, [*landed, *after], self._order.first_use(unit.index), make)
        )

    def _apply(self, claims: list[Claim], scale: float = 1.0) -> int:
        self._optimizer.apply(claims, scale)
        return sum(claim.parameter.numel() for claim in claims)

    def _placed(self, nbytes: int) -> DeviceStates:
        streamer = self._streamer
        return DeviceStates(self._units, self._optimizer, streamer.transfer, nbytes, streamer.gradients.limit_bytes)


class DeviceStates:
    """The first of `units` whose states by `optimizer` fit in `budget` bytes of the device.

    Their gradients stay on the device until they are updated, besides going to the host unless they are released.
    Updates run on the d2h stream, between the copies, and send the new weights home. A gradient that is changed on the
    host is left to the optimizer's `step`: version counters show that, or else some elements (`some_elements`: `.data`,
    NumPy, a GradScaler's `unscale_`), also of weights. So is that of a parameter that has begun to train since.
    """

    def __init__(
        self,
        units: Iterable[OffloadUnit],
        optimizer: HostAdamW,
        transfer: Transfer,
        budget: int,
        limit_bytes: int,
    ):
        self.units: set[OffloadUnit] = set()
        self._optimizer = optimizer
        self._transfer = transfer
        self._streams = transfer.streams
        self._deferred_frees = DeferredFrees(transfer, limit_bytes)
        self._gradients: dict[UnitTensor, PendingFree] = {}
        self._in_step = False
        # Gradients that updates queued since the step read: of units that have not come in yet, and of the last that
        # has. (Those of updates inside backward are limited, as that waits for the bus in any case.)
        self._used: dict[OffloadUnit, list[PendingFree]] = {}
        self._used_by_last: list[PendingFree] = []
        # Ends of the copies home of new weights.
        self._updated: dict[OffloadUnit, Event] = {}
        # Some elements of the weights at home, None while these are updated, and of the gradients that landed there.
        self._weight_marks: dict[Tensor, bytes | None] = {}
        self._gradient_marks: dict[UnitTensor, bytes] = {}
        left = budget
        for unit in units:
            parameters = [tensor.host for tensor in unit.trained]
            left -= optimizer.states.bytes_to_place(parameters)
            if left < 0:
                break
            if not parameters:
                continue
            self.units.add(unit)
            optimizer.states.place(parameters, self._streams.device)
            self._weight_marks |= {parameter: self._mark(parameter, parameter) for parameter in parameters}

    def updates(self, tensor: UnitTensor) -> bool:
        """Tells whether the state of a tensor is on the device."""
        return tensor.host in self._weight_marks

    def retain(self, tensor: UnitTensor, gradient: PendingFree) -> None:
        """Keeps a gradient of this step, instead of an earlier one; its copy to the host is queued."""
        if tensor in self._gradients:
            self._deferred_frees.add(self._gradients.pop(tensor))
        self._gradients[tensor] = gradient

    def begin_step(self) -> None:
        """Frees gradients that no update has used."""
        self._in_step = True
        self.notice_writes()
        self._free(self._gradients.values())
        self._gradients.clear()
        self._gradient_marks.clear()

    def notice_writes(self) -> None:
        """Counts writes to weights at home which raised no version counter, so that their copies are made anew."""
        for parameter, mark in self._weight_marks.items():
            now = mark and self._mark(parameter, parameter)
            if now != mark:
                torch.autograd.graph.increment_version(parameter)
                self._weight_marks[parameter] = now

    def offer(
        self, unit: OffloadUnit, tensors: Iterable[UnitTensor], scale: float = 1.0, after: Sequence[Event] = ()
    ) -> None:
        """Queues, behind the events `after`, the update of those of `tensors` whose gradient is as it landed.

        A gradient that was released is on the device alone.
        """
        streams, d2h, optimizer = self._streams, self._streams.d2h, self._optimizer
        retained = [tensor for tensor in tensors if tensor in self._gradients]
        as_landed = [tensor for tensor in retained if tensor.gradient.is_released or self._is_as_landed(tensor)]
        by_parameter = {tensor.host: tensor for tensor in as_landed}
        released = {tensor.host: self._gradients[tensor].tensor for tensor in as_landed if tensor.gradient.is_released}
        claims = optimizer.claim(by_parameter, released)
        if not claims:
            return
        for event in after:
            d2h.wait_event(event)
        updated = self._updated[unit] = streams.event()
        for claim in claims:
            tensor = by_parameter[claim.parameter]
            gradient = self._gradients.pop(tensor)
            self._weight_marks[claim.parameter] = None
            streams.reads(d2h, gradient, "update")
            with streams.on(d2h):
                # Used on this stream alone, the memory of the new weight may be freed before its copy is done.
                weights = optimizer.states.update_placed(claim, gradient.tensor, optimizer.kernel_on, scale)
            for home, weight in weights:
                streams.writes(d2h, unit.weights, "copy out")
                self._transfer.copy_out(home, weight, done=updated, what=f"new weight of {tensor.name}")
            gradient.done = streams.event()
            gradient.done.record(d2h)
            if self._in_step:
                self._deferred_frees.add(gradient)
            else:
                self._used.setdefault(unit, []).append(gradient)

    def before_onload(self, unit: OffloadUnit) -> None:
        """Makes h2d wait for the unit's new weights to be at home.

        Frees the gradients of the unit that came in before: compute waits for that unit's update anyway.
        """
        if unit in self._updated:
            self._streams.h2d.wait_event(self._updated[unit])
        if self._used_by_last:
            self._free(self._used_by_last)
        self._used_by_last = self._used.pop(unit, [])

    def ends_of_updates(self, unit: OffloadUnit) -> list[Event]:
        """Returns the events with which new weights of `unit` that are on their way are at home."""
        return [self._updated[unit]] if unit in self._updated else []

    def finish(self) -> None:
        """Blocks the host until all new weights are at home."""
        for unit, updated in self._updated.items():
            updated.synchronize()
            self._streams.reads(None, unit.weights, "what follows the update")
        self._forget()

    def end_step(self) -> None:
        """Forgets updates, which are past: nothing is written home any more."""
        self._in_step = False
        self._forget()
        self._gradient_marks = {
            tensor: self._mark(tensor.host.grad, tensor.host)
            for tensor in self._gradients
            if not tensor.gradient.is_released and tensor.gradient.is_as_landed(tensor.host)
        }

    def _is_as_landed(self, tensor: UnitTensor) -> bool:
        if not tensor.gradient.is_as_landed(tensor.host):
            return False
        mark = self._gradient_marks.get(tensor)
        return mark is None or mark == self._mark(tensor.host.grad, tensor.host)

    def _mark(self, tensor: Tensor, parameter: Tensor) -> bytes | None:
        """Returns some elements of a parameter or its gradient; None in a dry run."""
        return some_elements(tensor, self._optimizer.states.parts(parameter)) if tensor.device.type == "cpu" else None

    def _forget(self) -> None:
        for unit in self._updated:
            for parameter in self._weight_marks.keys() & {tensor.host for tensor in unit.trained}:
                self._weight_marks[parameter] = self._mark(parameter, parameter)
        self._updated.clear()
        for gradients in (*self._used.values(), self._used_by_last):
            self._free(gradients)
        self._used.clear()
        self._used_by_last = []

    def _free(self, gradients: Iterable[PendingFree]) -> None:
        for gradient in gradients:
            self._deferred_frees.add(gradient)
        self._deferred_frees.release()
