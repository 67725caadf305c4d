"""Sends each gradient where it belongs: home, to another destination, to its update alone, or to autograd on the host.

A gradient lands when autograd has summed all uses of a stand-in.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.streams.registry import Event
from offload.streams.transfer import Transfer
from offload.torch_private.module_contexts import SideBySideError
from offload.torch_private.torch_internals import (
    call_after_backward,
    count_references,
    executes_node,
    left_out_of_graphs,
)
from offload.weights.gradients.final import KEEP, FinalGradients, NotFinalError, ReleasedGradients
from offload.weights.gradients.offloader import GradientOffloader, Landing
from offload.weights.gradients.seams import NO_UPDATES, Destination, Updates
from offload.weights.units.unit import OffloadUnit, UnitTensor


class GradientLanding:
    """The gradients of one attached model's units, in steps and between them.

    `limit_bytes` of them may wait on the device for the bus. `releases`: they go to updates inside backward, without
    homes. An extension may put another `destination` in the place of homes, for `sharers` that divide the updates.
    """

    copy_in: Callable[[OffloadUnit], list[Event]]
    """given by the streamer: returns the end of the last copy of a unit in, if no stream has waited for it"""

    def __init__(
        self,
        units: Sequence[OffloadUnit],
        arena: HostArena,
        transfer: Transfer,
        *,
        limit_bytes: int,
        releases: bool,
        sharers: int = 1,
    ):
        streams = transfer.streams
        self.limit_bytes = limit_bytes
        self.final = FinalGradients(all_final=releases)
        self.offloader = GradientOffloader(transfer, limit_bytes)
        self.destination = Destination()
        self.released = ReleasedGradients(units, arena, streams, self.offloader, sharers) if releases else None
        self._units = units
        self._arena = arena
        self._streams = streams
        self._updates: Updates = NO_UPDATES
        # In a backward outside of steps autograd adds gradients of the host in another thread than that in which those
        # of a GPU land.
        self._lock = threading.RLock()
        self._in_step = False
        # Inside `accumulating` the step alone ends with readable gradients, else each backward does.
        self._accumulates = self._is_side_by_side = self._will_settle = False

    @property
    def wait_ms(self) -> float:
        """The time that the host has waited for room in the ring of released gradients."""
        return 0.0 if self.released is None else self.released.wait_ms

    def use_updates(self, updates: Updates) -> None:
        """Begins updates by `updates` from now on, where gradients are final."""
        self._updates = updates
        self.final.take_back = updates.take_back
        self.destination.updates = updates

    def close(self) -> None:
        """Ends it. The device is idle."""
        self.destination.close()

    # A step.

    def begin_step(self, norms: bool) -> None:
        """Begins a step. Raises RuntimeError where more than the update needs a gradient that is released.

        `norms`: take the norms of the gradients, for `norms`.
        """
        if self.released is not None:
            self.released.begin_step(self._updates)
        self._in_step, self._will_settle = True, False
        self.final.begin_step(self._units)
        self.offloader.begin_step(self._units, norms)
        self.destination.begin_step(norms)

    @contextmanager
    def accumulating(self, side_by_side: bool = False) -> Iterator[None]:
        """Surrounds backward passes whose gradients nobody reads before the step has ended.

        `side_by_side`: they are those of several microbatches in one.
        """
        self._accumulates, self._is_side_by_side = True, side_by_side
        try:
            yield
        finally:
            self._accumulates = self._is_side_by_side = False

    def last_microbatch(self) -> None:
        """Declares that the gradients which land from now on in this step are final."""
        self.final.counting = self._updates.early
        self.destination.last_microbatch()

    def end_backward(self) -> None:
        """Sends all home, also what the step, if it has failed, has left."""
        self._in_step = False
        self._send()
        self.destination.end_backward()
        self.final.end_step()

    def settle(self) -> None:
        """Blocks the host until all gradients are readable, and nothing is written home any more.

        Compute may still be under way: the host prepares the next step meanwhile.
        """
        self._send()
        self.offloader.release()
        # Of sums, too, for which d2h waits.
        written = self._streams.event()
        written.record(self._streams.d2h)
        written.synchronize()
        self.destination.release()
        for unit in self._units:
            for tensor in unit.trained:
                self._streams.reads(None, tensor.gradient, "the optimizer's update")

    def norms(self) -> dict[nn.Parameter, torch.Tensor]:
        """Returns the L2 norms of the last step's gradients, if they were taken: float32 scalars on the device.

        Gradients that were changed since they landed, or are not whole, are left out.
        """
        return self.destination.known_norms(self.offloader.norms(self._units))

    # Called inside backward.

    def land(
        self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, node: torch.autograd.graph.Node
    ) -> torch.Tensor | None:
        """Takes the sum of the gradients of a stand-in, on the device. `node` accumulates them into the host parameter.

        Returns what the node gets: a gradient in host memory, or None.
        """
        with self._lock:
            if not tensor.host.requires_grad:
                # Frozen since forward: autograd gives a resident parameter no gradient then.
                return None
            try:
                executes_node(node)
            except RuntimeError:
                # It is captured, as by `torch.autograd.grad`.
                return self._on_host(gradient)
            # First, because it raises where an update may be reading the host memory that the gradient goes to.
            is_final = self.final.counting and self.final.land(unit, tensor)
            if self.released is not None:
                self.released.check(tensor, gradient, is_final)
                if not self.destination.takes_gradients:
                    self.released.land(unit, tensor, gradient, self._updates, after=self.copy_in(unit))
                    return None
            if tensor in self.offloader.waiting:
                self._send()
            if tensor.gradient.leaves_to_autograd(tensor.host, gradient):
                tensor.gradient.landed_in = None
                return self._on_host(gradient)
            elsewhere = self.destination
            if not elsewhere.takes_gradients:
                self.land_at_home(unit, tensor, gradient, is_final)
            elif not elsewhere.take(unit, tensor, gradient):
                self.land_at_home(unit, tensor, gradient, is_final=False)
            # Readable when its backward, or the step, returns.
            if not self._in_step:
                self.settle()
            elif not self._will_settle:
                self._will_settle = True
                call_after_backward(self._after_backward)
            return None

    @left_out_of_graphs
    def before_host_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Blocks the host until the gradient that landed can be added to: a loss has used the parameter there directly.

        Raises RuntimeError where it cannot be, and SideBySideError where losses of microbatches side by side use it.
        """
        with self._lock:
            if self.released is not None:
                raise NotFinalError(
                    f"a loss uses {tensor.name} in host memory, besides the forward that has it on the device, and its"
                    " gradient is released to its update alone",
                    KEEP,
                )
            self.destination.check_host_use(unit, tensor)
            self._send()
            slot = tensor.gradient
            if slot.landed_in is None:
                # It did not land in memory of its own, but went to autograd, which has added the two.
                return
            if self._is_side_by_side:
                raise SideBySideError(f"{tensor.name} is used outside of the forward of its module")
            self.final.land(unit, tensor)
            slot.meets_host_gradient = True
            if slot.landed is not None:
                slot.landed.synchronize()
            self._streams.writes(None, slot, "autograd's sum on the host")

    def land_at_home(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, is_final: bool) -> None:
        """Sends a gradient to host memory of this process."""
        slot = tensor.gradient
        if tensor.host.grad is None and slot.memory is not None:
            slot.landed_in = None
            # In a dry run nobody keeps gradients, and all of a unit share one storage.
            if not slot.memory.is_meta and count_references(slot.memory) > 1:
                # Somebody still uses the last one in this memory.
                slot.memory = None
        if slot.memory is None:
            slot.make_memory(self._arena)
        if sent := self.offloader.land(unit, tensor, gradient, is_final):
            self._have_left(sent)

    def _send(self) -> None:
        """Sends home the gradients that wait for others."""
        self._have_left(self.offloader.send())

    def _have_left(self, batch: Sequence[Landing]) -> None:
        """Passes sent gradients to the optimizer, and frees their device copies behind their copies home."""
        if not batch:
            return
        if self._updates is NO_UPDATES:
            self.offloader.free([each.leaving for each in batch])
            return
        keeps = self._updates.retain_gradient
        self.offloader.free([each.leaving for each in batch if not keeps(each.unit, each.tensor, each.leaving)])
        final: dict[OffloadUnit, list[UnitTensor]] = {}
        for each in batch:
            if each.is_final:
                final.setdefault(each.unit, []).append(each.tensor)
        for unit, tensors in final.items():
            self._updates.gradients_landed(unit, tensors, after=self.copy_in(unit))

    def _on_host(self, gradient: torch.Tensor) -> torch.Tensor:
        """Returns a gradient in host memory of its own, and blocks the host until it and all others are there."""
        self.settle()
        # One with a graph, by `create_graph`, keeps it.
        with torch.set_grad_enabled(gradient.requires_grad):
            return gradient.to("cpu", copy=True) if gradient.device.type == "cuda" else gradient

    @left_out_of_graphs
    def _after_backward(self) -> None:
        self._will_settle = False
        if self._accumulates:
            self._send()
        else:
            # The caller made this backward itself, and may read the gradients when it returns.
            self.settle()
