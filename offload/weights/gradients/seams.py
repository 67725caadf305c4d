"""Defines where extensions act on gradients that have landed: `Updates` and `Destination`.

Streaming calls `Updates` at fixed points of a step, and `offload.optimizer.overlap` implements it for an optimizer that
updates weights while the step still runs. Without one, `NO_UPDATES` takes its place: weights then change between steps
only, on the thread that makes the steps. A `Destination` takes gradients that do not go home one by one. The core has
no other place: `HOME`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from offload.streams.registry import Event, Signal, Streams
from offload.streams.transfer import Counters, PendingFree
from offload.weights.gradients.offloader import RingBlock
from offload.weights.units.unit import OffloadUnit, UnitTensor


class Updates:
    """Updates of units that may be under way beside the step; this one makes none. `early`: inside backward."""

    early = False

    def begin_step(self) -> None:
        """Called when a step begins. Raises RuntimeError where the last one has begun updates and was not ended."""

    def before_onload(self, unit: OffloadUnit) -> None:
        """Makes the copy of the unit that is queued next on h2d come after the unit's updates.

        Blocks the host while the host itself still updates the unit.
        """

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Tells whether `before_onload` would block the host."""
        return False

    def keeps_gradients(self, unit: OffloadUnit) -> bool:
        """Tells whether `retain_gradient` would take charge of the unit's gradients."""
        return False

    def retain_gradient(self, unit: OffloadUnit, tensor: UnitTensor, gradient: PendingFree) -> bool:
        """Takes charge of a gradient's device memory, whose copy home is queued; False leaves it to the caller."""
        return False

    def gradients_landed(
        self,
        unit: OffloadUnit,
        tensors: Sequence[UnitTensor],
        after: Sequence[Event],
        released: RingBlock | PendingFree | None = None,
    ) -> Signal | None:
        """Called when gradients are final and their copies home queued: updates may begin after the events `after`.

        `released`: where a single one is, if not in `.grad`: on its way to the ring, or kept on the device. Returns
        what is set when the host has read it; None where the host does not.
        """
        return None

    def take_back(self) -> bool:
        """Undoes what has begun of this step's updates, which then begin after it; False where that cannot be done.

        Blocks the host. Where it returns False nothing has changed.
        """
        return False

    def abandon_step(self) -> None:
        """Called when a step ends by an error: takes back what can be. Raises nothing."""

    def end_step(self) -> None:
        """Called when a step is over and nothing is written home any more."""

    def counters(self) -> Counters:
        """Returns totals since construction."""
        return Counters()

    def close(self) -> None:
        """Makes the updates that have begun, and no others. At its end raises an error that nobody has got yet."""


class ImmediateUpdates(Updates):
    """`Updates` of a dry run, which take no time and change nothing."""

    early = True

    def __init__(self, streams: Streams):
        self._streams = streams

    def gradients_landed(
        self,
        unit: OffloadUnit,
        tensors: Sequence[UnitTensor],
        after: Sequence[Event],
        released: RingBlock | PendingFree | None = None,
    ) -> Signal | None:
        consumed = self._streams.signal()
        consumed.set()
        return consumed


NO_UPDATES = Updates()


class Destination:
    """Takes no gradient: all go home. `offload.sharing.summing` sums them over processes.

    `updates` may begin where a gradient is final.
    """

    takes_gradients = False

    def __init__(self) -> None:
        self.updates: Updates = NO_UPDATES

    def begin_step(self, norms: bool) -> None:
        """Begins a step. `norms`: take those of the gradients."""

    def last_microbatch(self) -> None:
        """Declares that the gradients which land from now on in this step are final."""

    def take(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> bool:
        """Takes a gradient, or a piece of it; False leaves it to its home. Raises RuntimeError if it comes too late."""
        return False

    def check_host_use(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Raises RuntimeError where a loss cannot add to a gradient on the host."""

    def end_backward(self) -> None:
        """Ends the last microbatch, also after an error."""

    def release(self) -> None:
        """Hands device memory back, for use behind its copies."""

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        """Returns the parameters whose gradients of the last step are sums over processes."""
        return frozenset()

    def known_norms(self, norms: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """Returns those of `norms` that are of whole gradients."""
        return dict(norms)

    def close(self) -> None:
        """Ends it. The device is idle."""
