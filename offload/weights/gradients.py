"""Copies gradients from the device to the host, and tells which of them are final."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

import torch
from torch import nn

from offload.runtime.deferred_free import DeferredFrees, PendingFree
from offload.runtime.transfer import Transfer
from offload.weights.unit_tensor import UnitTensor
from offload.weights.units import OffloadUnit


class GradientOffloader:
    """Copies gradients out on the d2h stream while backward goes on.

    At most `limit_bytes` of them wait on the device; beyond that compute waits for the oldest to leave. Where
    `parameter.grad` is set already (accumulation), the earlier gradient is fetched and added on the device, and the sum
    is sent home: the host never adds, and the order of additions is autograd's own.
    """

    def __init__(self, transfer: Transfer, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._transfer = transfer
        self._streams = transfer.streams
        self._deferred_frees = DeferredFrees(transfer, limit_bytes)
        self._takes_norms = False

    def begin_step(self, units: Iterable[OffloadUnit], norms: bool) -> None:
        """Forgets the norms of the last step. `norms`: take those of this step, on the device, whose memory is fast."""
        self._takes_norms = norms
        for unit in units:
            for tensor in unit.tensors:
                tensor.norm = None

    def land(self, tensor: UnitTensor, gradient: torch.Tensor) -> PendingFree:
        """Starts the copy of a gradient home; afterwards `tensor.host.grad` is its host memory.

        The bytes are there once `tensor.landed` is past. Returns the device's copy, for `free` or for somebody who
        still needs it.
        """
        streams = self._streams
        leaving = PendingFree(gradient, streams.event(), f"device gradient of {tensor.name}", streams.compute)
        streams.writes(streams.compute, leaving, "backward")
        earlier = tensor.host.grad
        if earlier is None:
            self._take_norm(tensor, gradient)
            self._transfer.after_compute(streams.d2h)
        else:
            self._fetch_and_add(earlier, leaving, tensor)
            with streams.on(streams.d2h):
                self._take_norm(tensor, gradient)
        streams.reads(streams.d2h, leaving, "copy out")
        streams.writes(streams.d2h, tensor, "copy out")
        # A gradient that was there is added to in place, as autograd does: its user may have assigned it.
        target = tensor.gradient if earlier is None else earlier
        self._transfer.copy_out(target, gradient, done=leaving.done, what=f"gradient of {tensor.name}")
        tensor.landed = leaving.done
        tensor.landed_in, tensor.landed_version = target, target._version
        tensor.host.grad = target
        return leaving

    def free(self, leaving: PendingFree) -> None:
        """Frees the device's copy of a gradient behind its copy home."""
        self._deferred_frees.add(leaving)

    def release(self) -> None:
        """Hands the device memory of every gradient back, for use behind its copy."""
        self._deferred_frees.release()

    @staticmethod
    def norms(units: Iterable[OffloadUnit]) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the norms that were taken in this step, but for gradients that were changed since they landed."""
        normed = (tensor for unit in units for tensor in unit.tensors if tensor.norm is not None)
        return {tensor.host: tensor.norm for tensor in normed if tensor.has_landed_gradient}

    def _take_norm(self, tensor: UnitTensor, gradient: torch.Tensor) -> None:
        if self._takes_norms:
            tensor.norm = torch.linalg.vector_norm(gradient, dtype=torch.float32)

    def _fetch_and_add(self, earlier: torch.Tensor, leaving: PendingFree, tensor: UnitTensor) -> None:
        streams = self._streams
        h2d, d2h = streams.h2d, streams.d2h
        name = f"earlier gradient of {tensor.name}"
        fetched = PendingFree(torch.empty_like(leaving.tensor), streams.event(), name, streams.compute)
        streams.writes(streams.compute, fetched, "what this memory was used for before")
        self._transfer.after_compute(h2d, d2h)
        if tensor.landed is not None:
            h2d.wait_event(tensor.landed)
        streams.reads(h2d, tensor, "accumulation")
        streams.writes(h2d, fetched, "copy in")
        arrived = streams.event()
        self._transfer.copy_in(fetched.tensor, earlier, done=arrived, what=name)
        d2h.wait_event(arrived)
        streams.reads(d2h, fetched, "accumulation")
        streams.writes(d2h, leaving, "accumulation")
        with streams.on(d2h), torch.no_grad():
            leaving.tensor.add_(fetched.tensor)
        fetched.done.record(d2h)
        self._deferred_frees.add(fetched)


class FinalGradients:
    """Tells which gradients are final as they land, by what the step before showed.

    Units are trusted in which every tensor trains, every gradient landed once in that step (under reentrant checkpoints
    a parameter that is used twice gets its gradient in pieces, none of them known to be the last), and no weight was
    needed after its gradient (as a frozen one may be, or one that is used detached). While `counting` is False, no
    gradient is final and nothing is learned.
    """

    def __init__(self) -> None:
        self.counting = False
        self._landed: Counter[UnitTensor] = Counter()
        self._needed_late: set[OffloadUnit] = set()
        self._trusted: set[OffloadUnit] = set()

    def begin_step(self, units: Iterable[OffloadUnit]) -> None:
        """Begins a step of these units."""
        self._trusted = {
            unit
            for unit in units
            if unit not in self._needed_late and all(self._landed[tensor] == 1 for tensor in unit.tensors)
        }
        self._landed.clear()
        self._needed_late.clear()

    def end_step(self) -> None:
        """Ends the step: nothing counts until the next one does."""
        self.counting = False

    def land(self, unit: OffloadUnit, tensor: UnitTensor) -> bool:
        """Notes a gradient that is about to land. Returns True if it is final.

        Raises RuntimeError where an earlier one was taken for final.
        """
        if not self.counting:
            return False
        self._landed[tensor] += 1
        if unit in self._trusted and self._landed[tensor] > 1:
            raise RuntimeError(
                f"a gradient of {tensor.name} came after the last that was expected: its update may have begun."
                " Reentrant checkpoints around layers that are used twice need use_reentrant=False"
            )
        return unit in self._trusted

    def use(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Notes a use of a weight, in a step or between two.

        Raises RuntimeError where its gradient was taken for final.
        """
        if not self.counting or not self._landed[tensor]:
            return
        if unit in self._trusted:
            raise RuntimeError(
                f"{tensor.name} is needed after its gradient, which it was not in the step before: its update may have"
                " begun. Where uses change from step to step, let updates begin after backward (early=False), and use"
                " checkpoints with use_reentrant=False"
            )
        self._needed_late.add(unit)
