"""Tells which gradients are final: nothing will be added to them in this step, and no weight is needed after them.

Gradients that are released go to their updates alone, inside backward, and are in no `.grad` afterwards. An update that
begins when its gradient has landed is the only reader of that gradient (LOMO fuses the two, Lv et al. 2023). So
gradients need no homes: on the host they pass through a ring, and those of units that are updated on the device do not
leave it. That holds from the first step on, so every gradient is taken for final when it lands, and one that is not is
refused.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import torch

from offload.memory.host_memory import HostArena
from offload.streams.registry import Event, Streams
from offload.streams.transfer import PendingFree
from offload.torch_private.torch_internals import has_gradient_hooks
from offload.weights.gradients.offloader import GradientOffloader, GradientRing, gradient_ring_bytes, is_sparse
from offload.weights.gradients.seams import Updates
from offload.weights.units.unit import OffloadUnit, UnitTensor

OF_AN_EXPERT = re.compile(r"(^|\.)experts\.\d+\.")
KEEP = "keep gradients (optimizer.gradients=keep; in a loop of your own, AttachOptions(release_gradients=False))"


class NotFinalError(RuntimeError):
    """A gradient is not the last, or a weight is needed after it, where its update may have begun."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


class FinalGradients:
    """Tells which gradients are final as they land, by what the step before showed. `all_final`: all are.

    A unit is trusted if all of it trains, each gradient landed once in that step (reentrant checkpoints deliver some in
    pieces) and no weight was needed after its gradient (as a detached one may be). While `counting` is False, no
    gradient is final and nothing is learned.

    `take_back`, of `Updates`, undoes the updates that have begun; False where it cannot. It is called where a gradient
    was taken for final and is not; no other of that step is final then.
    """

    def __init__(self, all_final: bool = False) -> None:
        self.counting = False
        self.has_landed = False
        """a gradient has landed while `counting`, so uses of weights are of interest: see `use`"""
        self.take_back: Callable[[], bool] = lambda: False
        self._all_final = all_final
        self._landed: Counter[UnitTensor] = Counter()
        self._needed_late: set[OffloadUnit] = set()
        self._trusted: set[OffloadUnit] = set()

    def begin_step(self, units: Iterable[OffloadUnit]) -> None:
        """Begins a step of these units."""
        landed, late = self._landed, self._needed_late
        self._trusted = {
            unit
            for unit in units
            if self._all_final or (unit not in late and all(landed[tensor] == 1 for tensor in unit.tensors))
        }
        self._landed.clear()
        self.has_landed = False
        self._needed_late.clear()

    def end_step(self) -> None:
        """Ends the step: nothing counts until the next one does."""
        self.counting = self.has_landed = False

    def trusts(self, unit: OffloadUnit) -> bool:
        """Tells whether a gradient of the unit that lands now is final."""
        return self.counting and unit in self._trusted

    def land(self, unit: OffloadUnit, tensor: UnitTensor) -> bool:
        """Notes a gradient that is about to land. Returns True if it is final.

        Raises RuntimeError where an earlier one was taken for final, and its update cannot be undone.
        """
        if not self.counting:
            return False
        self._landed[tensor] += 1
        self.has_landed = True
        if unit in self._trusted and self._landed[tensor] > 1 and not self._retract():
            raise NotFinalError(
                f"a gradient of {tensor.name} came after the last that was expected",
                "its update may have begun. Reentrant checkpoints around layers that are used twice need"
                f" use_reentrant=False{self._or_keep}",
            )
        return unit in self._trusted

    def use(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Notes a use of a weight, in a step or between two.

        Raises RuntimeError where its gradient was taken for final, and its update cannot be undone.
        """
        if not self.has_landed or not self._landed[tensor]:
            return
        if unit in self._trusted and not self._retract():
            before = "" if self._all_final else ", which it was not in the step before"
            raise NotFinalError(
                f"{tensor.name} is needed after its gradient{before}",
                "its update may have begun. Where uses change from step to step, let updates begin after backward"
                f" (early=False), and use checkpoints with use_reentrant=False{self._or_keep}",
            )
        self._needed_late.add(unit)

    @property
    def _or_keep(self) -> str:
        return f"; or {KEEP}" if self._all_final else ""

    def _retract(self) -> bool:
        if not self.take_back():
            return False
        self._trusted.clear()
        return True


def why_kept(units: Sequence[OffloadUnit], sharers: int = 1) -> str | None:
    """Returns in words why gradients of `units` cannot be released; None if they can.

    One of several `sharers` may lack the gradient of an expert without tokens: that unit is summed after backward.
    """
    for unit in units:
        if sharers > 1 and (expert := next((t.name for t in unit.trained if OF_AN_EXPERT.search(t.name)), None)):
            return f"one of the processes that share {expert} has no gradient of it where no token uses the expert"
        others = [tensor for tensor in unit.tensors if not tensor.trains]
        if unit.trained and others:
            kind = "a buffer" if others[0].is_buffer else "frozen"
            return f"{others[0].name} is {kind}, and gradients are final when they land only in units where all trains"
    return None


class ReleasedGradients:
    """Sends the gradients of `units` to their updates. `wait_ms` is the time that the host waited for room in the ring.

    Takes the memory of the ring from `arena`. `sharers`: the number of processes that divide the updates.
    """

    def __init__(
        self,
        units: Sequence[OffloadUnit],
        arena: HostArena,
        streams: Streams,
        offloader: GradientOffloader,
        sharers: int = 1,
    ):
        self._units = units
        self._offloader = offloader
        nbytes = gradient_ring_bytes(units, sharers)
        self._ring = GradientRing(arena.allocate(nbytes, "the ring of gradients"), streams)

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

    def check(self, tensor: UnitTensor, gradient: torch.Tensor, is_final: bool) -> None:
        """Raises RuntimeError for a gradient that is not final, that something else needs too, or that is sparse."""
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

    def land(
        self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, updates: Updates, after: Sequence[Event]
    ) -> None:
        """Hands a gradient to its update, which begins when it has landed and the events `after` are past."""
        leaving = self._offloader.hand_over(tensor, gradient)
        if updates.retain_gradient(unit, tensor, leaving):
            updates.gradients_landed(unit, [tensor], after, leaving)
            return
        self.send(unit, tensor, leaving, updates, after)
        self._offloader.free([leaving])

    def send(
        self,
        unit: OffloadUnit,
        tensor: UnitTensor,
        leaving: PendingFree,
        updates: Updates,
        after: Sequence[Event],
        part: range | None = None,
    ) -> None:
        """Sends a gradient, or these elements of it, which d2h may read, to its update; `leaving.done` ends that."""
        block = self._ring.block(tensor, part)
        self._offloader.send_released(tensor, leaving, block)
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
