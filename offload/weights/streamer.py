"""Streams weights: units live on the host, are on the device only while in use, and send their gradients home.

One mechanism serves every granularity. Around the forward of a module that uses a unit, a window is open: the module
holds device stand-ins of its parameters, and weights that autograd saves are saved by name (`saved_weights`). In
backward the saved names bring units back, and gradients leave as they are made (`gradients`). Outside a step modules
hold their host parameters, so optimizers, checkpoints and `state_dict` need nothing new.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import nn

from offload.runtime.block_buffers import arrived, leaving
from offload.runtime.counters import Counters
from offload.runtime.device_slots import DeviceSlots
from offload.runtime.host_memory import HostArena
from offload.runtime.registry import Streams
from offload.runtime.sharers import NO_SHARERS, Sharers, meet
from offload.runtime.torch_internals import (
    call_after_backward,
    gradient_accumulated_hooks,
    gradient_hooks,
    is_captured,
    left_out_of_graphs,
)
from offload.runtime.transfer import Telemetry, Transfer
from offload.weights.file_homes import NO_FILES, NoFiles
from offload.weights.gathering import SliceGatherer
from offload.weights.gradients import FinalGradients, GradientOffloader
from offload.weights.partition import CutModel
from offload.weights.placement import DevicePlacement
from offload.weights.prefetcher import Prefetcher
from offload.weights.saved_weights import SavedWeights
from offload.weights.shared_homes import make_shared_homes
from offload.weights.summing import GradientSum
from offload.weights.unit_tensor import UnitTensor
from offload.weights.units import OffloadUnit
from offload.weights.updates import NO_UPDATES, Updates
from offload.weights.windows import Windows

# Gradients that may wait on the device for the bus, in units of the largest unit.
GRADIENT_SLOTS = 2


class WeightStreamer:
    """A model whose units stream between the host and one device.

    Takes the model over on construction and gives it back with `detach`. `make_files`, given the arena and the
    transfer, returns what reads the units that have their homes in files. Raises MemoryError, before anything is
    allocated, where the host has no room for the units. After an exception the model is as it was found.

    `sharers` are the processes that share the homes of the units, and the memory for the sums of their gradients.
    Raises ValueError for a parameter that they cannot share.
    """

    def __init__(
        self,
        cut: CutModel,
        streams: Streams,
        *,
        slots: int,
        prefetch: int,
        pin: bool = True,
        make_files: Callable[[HostArena, Transfer], NoFiles] = lambda arena, transfer: NO_FILES,
        sharers: Sharers = NO_SHARERS,
    ):
        self.cut = cut
        self.sharers = sharers
        shared = sharers.count > 1
        self.telemetry = Telemetry(streams)
        self.transfer = Transfer(streams, self.telemetry)
        self.arena = HostArena(streams.device, pin)
        # Steps that may fail for lack of memory come before the model is touched.
        self.homes, slot_bytes = self.arena, cut.largest_unit_bytes
        if shared:
            self.homes, slot_bytes = make_shared_homes(cut, sharers, streams.device, pin)
        else:
            self.arena.require(cut.unit_bytes - cut.file_bytes + cut.gradient_bytes)
        self._streams = streams
        self._slots = DeviceSlots(slots, slot_bytes, streams)
        self._final = FinalGradients()
        self._updates: Updates = NO_UPDATES
        self._in_step = self._in_inference = False
        # Inside `accumulate` the step alone ends with readable gradients, else each backward does.
        self._accumulates = False
        self._will_settle = False
        # Gradients that land are final, so sharers may sum them.
        self._are_final = False
        with ExitStack() as undo:
            undo.callback(self.arena.close)
            undo.callback(self.homes.close)
            self._files = make_files(self.arena, self.transfer)
            undo.callback(self._files.close)
            for unit in cut.units:
                undo.callback(unit.put_back)
                unit.bring_home(self.homes, self._files.files, is_shared=shared)
                leaving(unit.buffer_places)
                undo.callback(arrived, unit.buffer_places)
            self._placement = DevicePlacement(cut.resident, streams.device)
            undo.callback(self._placement.put_back)
            # What was found has no use any more, and may be memory that nobody else needs.
            self.cut = cut = replace(cut, resident=self._placement.held)
            poison = not streams.asynchronous
            limit_bytes = GRADIENT_SLOTS * cut.largest_unit_bytes
            self.gradients = GradientOffloader(self.transfer, limit_bytes)
            self._gradient_sum = gatherer = None
            if shared:
                self._gradient_sum = GradientSum(sharers, self.transfer, limit_bytes, self._land_alone)
                gatherer = SliceGatherer(sharers, cut.units, self.transfer, self._gradient_sum)
            self._gatherer = gatherer
            self.prefetcher = Prefetcher(cut.units, self._slots, self.transfer, prefetch, poison, self._files, gatherer)
            saved = SavedWeights(self._slots, self.prefetcher, self._final.use)
            note_use = self._final.use
            self._windows = Windows(cut, self._slots, self.prefetcher, saved, streams, sink=self, note_use=note_use)
            # From here on the homes have the values that anybody gives them.
            meet(sharers, "attaching the model")
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
        self._take_changes()
        self._updates.begin_step()
        self._in_step, self._will_settle = True, False
        try:
            self._final.begin_step(self.cut.units)
            self.gradients.begin_step(self.cut.units, norms)
            if self._gradient_sum is not None:
                self._gradient_sum.begin_step(norms)
            self.prefetcher.begin_step()
            self._windows.begin_step()
            yield
            if self._gatherer is not None:
                self._gatherer.agree_on_end()
                self._gradient_sum.end_step()
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
        self._take_changes()
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

    def _take_changes(self) -> None:
        """Takes over what the user has changed since the last step. Raises RuntimeError for what cannot be streamed."""
        for unit in self.cut.units:
            if self.sharers.count > 1 and (strays := unit.strays()):
                raise RuntimeError(
                    f"{strays[0].name} was given other data, and several processes share its memory: copy into it"
                    " (parameter.data.copy_), or detach the mode first"
                )
            unit.gather(self.arena)

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
        self._are_final = self._gradient_sum is not None

    def gradient_norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the L2 norms of the last step's gradients, if they were taken: float32 scalars on the device.

        Gradients that a hook or the caller has changed since they landed are left out, and so are those that sharers
        have not summed yet.
        """
        norms = self.gradients.norms(self.cut.units)
        if self._gradient_sum is None:
            return norms
        summed = self.summed_parameters()
        return {parameter: norm for parameter, norm in norms.items() if parameter in summed}

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        """Returns the parameters whose gradients of the last step are sums over the sharers already."""
        summed = () if self._gradient_sum is None else self._gradient_sum.summed
        return frozenset(tensor.host for tensor in summed)

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
        if self._gradient_sum is not None:
            if self._gradient_sum.takes(unit, tensor, self._are_final):
                self._gradient_sum.land(unit, tensor, gradient)
            else:
                self._land_alone(unit, tensor, gradient)
            self._settle_in_time()
            return None
        self._prepare_gradient(unit, tensor)
        leaving = self.gradients.land(tensor, gradient)
        if not self._updates.retain_gradient(unit, tensor, leaving):
            self.gradients.free(leaving)
        self._settle_in_time()
        if is_final:
            self._updates.gradient_landed(unit, tensor, after=self.prefetcher.unawaited_copy(unit))
        return None

    def _land_alone(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> None:
        """Sends a gradient that sharers do not sum home, to memory of this process."""
        self._prepare_gradient(unit, tensor)
        self.gradients.free(self.gradients.land(tensor, gradient))

    def _settle_in_time(self) -> None:
        """Makes the gradient that has landed readable when its backward, or the step, returns."""
        if not self._in_step:
            self._settle()
        elif not (self._accumulates or self._will_settle):
            # The caller made this backward itself, and may read the gradients when it returns.
            self._will_settle = True
            call_after_backward(self._settle_after_backward)

    @left_out_of_graphs
    def before_host_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Blocks the host until the gradient that landed can be added to. Raises RuntimeError if sharers sum it."""
        if self._gradient_sum is not None:
            self._gradient_sum.refuse_host_use(unit, tensor)
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
        self._in_step = self._are_final = False
        if self._gradient_sum is not None:
            # What is left is that of a step that has failed.
            self._gradient_sum.abandon()
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
        if self._gradient_sum is not None:
            self._gradient_sum.release()
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
        """Gives the model back: its own forwards, tensors where they were found (host memory for meta tensors).

        Tensors with a home in a file stay views of it, copied on write.
        """
        self.check_between_steps()
        self._updates.close()
        self._windows.remove()
        # They refer back to this object: without them the device memory goes with its last reference.
        self._windows = None
        self.prefetcher.evict_all()
        self._streams.synchronize()
        self._files.close()
        self.use_updates(NO_UPDATES)
        for slot in self._slots:
            self._streams.writes(None, slot, "the allocator's next owner")
        for unit in self.cut.units:
            self._streams.writes(None, unit.weights, "the model's owner")
            unit.restore()
            arrived(unit.buffer_places)
        self._placement.restore()
        self.homes.close()
        self.arena.close()

    def counters(self) -> Counters:
        """Counts copies and updates since construction, and the host memory of the units now."""
        # Of forwards between steps, too.
        self.telemetry.collect()
        copies = Counters(
            h2d_bytes=self.telemetry.h2d_bytes,
            d2h_bytes=self.telemetry.d2h_bytes,
            stall_ms=self.telemetry.stall_ms,
            host_pinned_bytes=sum(arena.pinned_bytes for arena in {self.arena, self.homes}),
            host_pageable_bytes=sum(arena.pageable_bytes for arena in {self.arena, self.homes}),
            file_bytes=self._files.read_bytes,
            file_wait_ms=self._files.wait_ms,
        )
        return copies + self._updates.counters()


def _is_sparse(gradient: torch.Tensor | None) -> bool:
    return gradient is not None and gradient.layout is not torch.strided
