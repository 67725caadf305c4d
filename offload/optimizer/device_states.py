"""Units whose optimizer states live on the device and are updated there, at the device's memory bandwidth.

A device updates thirty times as fast as its host, so states that fit there take work off the host: those of the units
that the next forward needs first, whose gradients land last.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.states import some_elements
from offload.streams.registry import Event
from offload.streams.transfer import DeferredFrees, PendingFree, Transfer
from offload.weights.units.unit import OffloadUnit, UnitTensor


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
