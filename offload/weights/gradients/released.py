"""Gradients that are released: they go to their updates alone, inside backward, and are in no `.grad` afterwards.

An update that begins when its gradient has landed is the only reader of that gradient (LOMO fuses the two, Lv et al.
2023). So gradients need no homes: on the host they pass through a ring, and those of units that are updated on the
device do not leave it. That holds from the first step on, so every gradient is taken for final when it lands, and one
that is not is refused.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from offload.memory.host_memory import HostArena
from offload.streams.registry import Event, Streams
from offload.torch_private.torch_internals import has_gradient_hooks
from offload.weights.gradients.final import KEEP, NotFinalError
from offload.weights.gradients.offloader import GradientOffloader, is_sparse
from offload.weights.gradients.ring import GradientRing, gradient_ring_bytes
from offload.weights.gradients.seams import Updates
from offload.weights.units.unit import OffloadUnit, UnitTensor


def why_kept(units: Sequence[OffloadUnit]) -> str | None:
    """Returns in words why gradients of `units` cannot be released; None if they can."""
    for unit in units:
        others = [tensor for tensor in unit.tensors if not tensor.trains]
        if unit.trained and others:
            kind = "a buffer" if others[0].is_buffer else "frozen"
            return f"{others[0].name} is {kind}, and gradients are final when they land only in units where all trains"
    return None


class ReleasedGradients:
    """Sends the gradients of `units` to their updates. `wait_ms` is the time that the host waited for room in the ring.

    Takes the memory of the ring from `arena`.
    """

    def __init__(self, units: Sequence[OffloadUnit], arena: HostArena, streams: Streams, offloader: GradientOffloader):
        self._units = units
        self._offloader = offloader
        self._ring = GradientRing(arena.allocate(gradient_ring_bytes(units), "the ring of gradients"), streams)

    @property
    def wait_ms(self) -> float:
        return self._ring.wait_ms

    def begin_step(self, updates: Updates) -> None:
        """Raises RuntimeError where something besides the update would need a gradient of the step that begins."""
        if not updates.early:
            raise RuntimeError(
                "gradients are released to updates that begin inside backward, and there are none: call"
                f" attached.overlap(optimizer, early=True) before the step, or {KEEP}"
            )
        for unit in self._units:
            for tensor in unit.trained:
                self._check(tensor)

    def land(
        self,
        unit: OffloadUnit,
        tensor: UnitTensor,
        gradient: torch.Tensor,
        is_final: bool,
        updates: Updates,
        after: Sequence[Event],
    ) -> None:
        """Hands a gradient to its update, which begins when it has landed and the events `after` are past.

        Raises RuntimeError for a gradient that is not final, that something else needs too, or that is sparse.
        """
        if not is_final:
            raise NotFinalError(
                f"the gradient of {tensor.name} is not final when it lands, and it is released to its update alone",
                "compute the step in one attached.accumulate, of one microbatch or under shard_offload, which adds them"
                f" up on the device; or {KEEP}",
            )
        self._check(tensor)
        if is_sparse(gradient):
            raise RuntimeError(f"the gradient of {tensor.name} is sparse, and its bytes are not known before: {KEEP}")
        if gradient.requires_grad:
            raise RuntimeError(f"the gradient of {tensor.name} has a graph (create_graph), which updates drop: {KEEP}")
        leaving = self._offloader.hand_over(tensor, gradient)
        if updates.retain_gradient(unit, tensor, leaving):
            updates.gradients_landed(unit, [tensor], after, leaving)
            return
        block = self._ring.block(tensor)
        self._offloader.send_released(tensor, leaving, block)
        self._offloader.free([leaving])
        consumed = updates.gradients_landed(unit, [tensor], after, block)
        if consumed is not None:
            self._ring.lend(block, consumed)

    @staticmethod
    def _check(tensor: UnitTensor) -> None:
        if has_gradient_hooks(tensor.host):
            raise RuntimeError(
                f"{tensor.name} has a hook on its gradient, which is released to its update alone: {KEEP}, or remove"
                " the hook"
            )
        if tensor.host.grad is not None:
            raise RuntimeError(
                f"{tensor.name} has a gradient already, to which that of the step would be added, and it is released to"
                f" its update alone: set it to None before the step (optimizer.zero_grad), or {KEEP}"
            )


def used_on_host(tensor: UnitTensor) -> NotFinalError:
    """Returns the error for a loss that adds to a released gradient on the host."""
    return NotFinalError(
        f"a loss uses {tensor.name} in host memory, besides the forward that has it on the device, and its gradient is"
        " released to its update alone",
        KEEP,
    )
