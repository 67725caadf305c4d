"""Streams weights: units live on the host, are on the device only while in use, and send their gradients home.

One mechanism serves every granularity. Around the forward of a module that uses a unit, a window is open: the module
holds device stand-ins of its parameters, and weights that autograd saves are saved by name (`saved_weights`). In
backward the saved names bring units back, and gradients leave as they are made (`gradients`). Outside a step modules
hold their host parameters, so optimizers, checkpoints and `state_dict` need nothing new.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn

from offload.runtime.block_buffers import arrived, leaving
from offload.runtime.counters import Counters
from offload.runtime.device_slots import DeviceSlots
from offload.runtime.host_memory import HostArena
from offload.runtime.registry import Streams
from offload.runtime.torch_internals import (
    call_after_backward,
    gradient_accumulated_hooks,
    gradient_hooks,
    is_captured,
    left_out_of_graphs,
)
from offload.runtime.transfer import Telemetry, Transfer
from offload.weights.gradients import FinalGradients, GradientOffloader
from offload.weights.partition import CutModel
from offload.weights.placement import DevicePlacement
from offload.weights.prefetcher import Prefetcher
from offload.weights.saved_weights import SavedWeights
from offload.weights.units import OffloadUnit, UnitTensor
from offload.weights.updates import NO_UPDATES, Updates
from offload.weights.windows import Windows

# Gradients that may wait on the device for the bus, in units of the largest unit.
GRADIENT_SLOTS = 2


class WeightStreamer:
    """A model whose units stream between the host and one device.

    Takes the model over on construction and gives it back with `detach`. Raises MemoryError, before anything is
    allocated, where the host has no room for the units. After an exception the model is as it was found.
    """

    def __init__(self, cut: CutModel, streams: Streams, *, slots: int, prefetch: int, pin: bool = True):
        self.cut = cut
        self.telemetry = Telemetry(streams)
        self.transfer = Transfer(streams, self.telemetry)
        self.arena = HostArena(streams.device, pin)
        # Steps that may fail for lack of memory come before the model is touched.
        self.arena.require(cut.unit_bytes + cut.gradient_bytes)
        self._streams = streams
        self._slots = DeviceSlots(slots, cut.largest_unit_bytes, streams)
        self._final = FinalGradients()
        self._updates: Updates = NO_UPDATES
        self._in_step = self._in_inference = False
        # Inside `accumulate` the step alone ends with readable gradients, else each backward does.
        self._accumulates = False
        self._will_settle = False
        with ExitStack() as undo:
            undo.callback(self.arena.close)
            for unit in cut.units:
                undo.callback(unit.put_back)
                unit.bring_home(self.arena)
                leaving(unit.buffer_places)
                undo.callback(arrived, unit.buffer_places)
            self._placement = DevicePlacement(cut.resident, streams.device)
            undo.callback(self._placement.put_back)
            # What was found has no use any more, and may be memory that nobody else needs.
            self.cut = cut = replace(cut, resident=self._placement.held)
            poison = not streams.asynchronous
            self.prefetcher = Prefetcher(cut.units, self._slots, self.transfer, prefetch, poison)
            self.gradients = GradientOffloader(self.transfer, GRADIENT_SLOTS * cut.largest_unit_bytes)
            saved = SavedWeights(self._slots, self.prefetcher, self._final.use)
            note_use = self._final.use
            self._windows = Windows(cut, self._slots, self.prefetcher, saved, streams, sink=self, note_use=note_use)
            undo.pop_all()

    def use_updates(self, updates: Updates) -> None:
        """Calls `updates` at the points of a step from now on; `detach` closes it."""
        self._updates = self.prefetcher.updates = updates

    # A step: begin, windows, landing, end.

    @contextmanager
    def step(self, norms: bool = False) -> Iterator[None]:
        """Goes around the forward and backward passes of one step, of one or of several microbatches.

        `norms`: take the norms of the gradients, for `gradient_norms`.
        Afterwards gradients are readable on the host and no copy is in flight; that holds after an exception too.
        Raises RuntimeError when a step is open already, when updates of the last one have begun inside backward and the
        optimizer has not ended it, and for a parameter that was moved, or was frozen until now.
        """
        if self._in_step:
            raise RuntimeError("a step is open already: close it before the next")
        if self._in_inference:
            raise RuntimeError("a step inside mode.inference(), where weights stay as they are: end it before the step")
        for unit in self.cut.units:
            unit.gather(self.arena)
        self._updates.begin_step()
        self._in_step, self._will_settle = True, False
        try:
            self._final.begin_step(self.cut.units)
            self.gradients.begin_step(self.cut.units, norms)
            self.prefetcher.begin_step()
            self._windows.begin_step()
            yield
        finally:
            self._end_step()

    @contextmanager
    def inference(self) -> Iterator[None]:
        """Goes around forwards without gradients, between which nothing changes the weights: they follow without a gap.

        Slots keep their units, and the units that the next forward uses first come in while this one ends. Inside a
        step, and inside itself, it does nothing more. Raises RuntimeError for a parameter that was moved, and for one
        that was changed inside, where its version counter shows that.
        """
        if self._in_step or self._in_inference:
            yield
            return
        for unit in self.cut.units:
            unit.gather(self.arena)
        self._in_inference = True
        try:
            self.prefetcher.begin_inference()
            self._windows.begin_inference()
            yield
            self.prefetcher.check_promise()
        finally:
            self._in_inference = False
            self._windows.end_inference()
            self.prefetcher.let_host_write()

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Surrounds backward passes whose gradients nobody reads before the step has ended."""
        self._accumulates = True
        try:
            yield
        finally:
            self._accumulates = False

    def last_microbatch(self) -> None:
        """Declares that the gradients which land from now on in this step are final."""
        self._final.counting = self._updates.early

    def gradient_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the L2 norms of the last step's gradients, if they were taken: float32 scalars on the device.

        Gradients that a hook or the caller has changed since they landed are left out.
        """
        return self.gradients.norms(self.cut.units)

    def land(
        self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, node: torch.autograd.graph.Node
    ) -> torch.Tensor | None:
        """Sends a gradient home; see `GradientSink`."""
        if not tensor.trains:
            # Frozen since forward: autograd gives a resident parameter no gradient then.
            return None
        if is_captured(node):
            return self._on_host(gradient)
        # First, because it raises where an update may be reading the host memory that the gradient goes to.
        is_final = self._final.land(unit, tensor)
        hooked = gradient_hooks(tensor.host) or gradient_accumulated_hooks(tensor.host)
        is_sparse = _is_sparse(gradient) or _is_sparse(tensor.host.grad)
        if hooked or is_sparse or (tensor.meets_host_gradient and tensor.host.grad is not None):
            # Hooks run on the host, where they were registered, and autograd accumulates what they return. So it does
            # where a loss uses the weight on the host: it adds that gradient first, and then the sum to the earlier.
            # Sparse gradients it joins: their bytes are not known before.
            tensor.landed_in = None
            return self._on_host(gradient)
        self._prepare_gradient(unit, tensor)
        leaving = self.gradients.land(tensor, gradient)
        if not self._updates.retain_gradient(unit, tensor, leaving):
            self.gradients.free(leaving)
        if not self._in_step:
            self._settle()
        elif not (self._accumulates or self._will_settle):
            # The caller made this backward itself, and may read the gradients when it returns.
            self._will_settle = True
            call_after_backward(self._settle_after_backward)
        if is_final:
            self._updates.gradient_landed(unit, tensor, after=self.prefetcher.unawaited_copy(unit))
        return None

    @left_out_of_graphs
    def before_host_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Blocks the host until the gradient that landed can be added to."""
        if tensor.landed_in is None:
            # It did not land in memory of its own, but went to autograd, which has added the two.
            return
        self._final.land(unit, tensor)
        tensor.meets_host_gradient = True
        if tensor.landed is not None:
            tensor.landed.synchronize()
        self._streams.writes(None, tensor, "autograd's sum on the host")

    def _on_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient in host memory of its own, and blocks the host until it and all others are there."""
        self._settle()
        return gradient.to("cpu", copy=True) if gradient.device.type == "cuda" else gradient

    def _prepare_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Makes host memory for the gradient that lands, if there is none or somebody still uses the last one in it."""
        if tensor.host.grad is None and tensor.gradient is not None:
            tensor.landed_in = None
            if tensor.gradient_is_held:
                tensor.gradient = None
        unit.ensure_gradient(tensor, self.arena)

    def _end_step(self) -> None:
        self._in_step = False
        self._final.end_step()
        self._windows.end_step()
        self.prefetcher.end_step()
        self._settle()
        self._updates.end_step()
        for unit in self.cut.units:
            if not self._updates.is_pending(unit):
                self._streams.writes(None, unit.weights, "the optimizer's update")
        self.telemetry.collect()

    @left_out_of_graphs
    def _settle_after_backward(self) -> None:
        self._will_settle = False
        self._settle()

    def _settle(self) -> None:
        """Blocks the host until all gradients are readable, and nothing reads or writes the homes any more."""
        self.gradients.release()
        self._streams.synchronize()
        for unit in self.cut.units:
            for tensor in unit.trained:
                self._streams.reads(None, tensor, "the optimizer's update")

    # Before and after all steps.

    def check_weights_may_change(self) -> None:
        """Raises RuntimeError inside `inference`, where the weights stay as they are."""
        if self._in_inference:
            raise RuntimeError("optimizer.step() inside mode.inference(), where weights stay as they are: end it first")

    def check_between_steps(self) -> None:
        """Raises RuntimeError inside a step, where the model cannot be given back."""
        if self._in_step:
            raise RuntimeError("detach inside a step: close the step first")
        if self._in_inference:
            raise RuntimeError("detach inside mode.inference(): end it first")

    def detach(self) -> None:
        """Gives the model back: its own forwards, tensors where they were found (host memory for meta tensors)."""
        self.check_between_steps()
        self._updates.close()
        self._windows.remove()
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
        self.arena.close()

    def counters(self) -> Counters:
        """Counts copies and updates since construction, and the host memory of the units now."""
        # Of forwards between steps, too.
        self.telemetry.collect()
        copies = Counters(
            h2d_bytes=self.telemetry.h2d_bytes,
            d2h_bytes=self.telemetry.d2h_bytes,
            stall_ms=self.telemetry.stall_ms,
            host_pinned_bytes=self.arena.pinned_bytes,
            host_pageable_bytes=self.arena.pageable_bytes,
        )
        return copies + self._updates.counters()


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
