"""The interface between weight streaming and an optimizer that updates weights while the step still runs.

Streaming calls it at fixed points of a step; `offload.optimizer.overlap` implements it. Without such an optimizer
`NO_UPDATES` takes its place: weights then change between steps only, on the thread that makes the steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from offload.runtime.counters import Counters
from offload.runtime.deferred_free import PendingFree
from offload.runtime.registry import Event
from offload.weights.unit_tensor import UnitTensor
from offload.weights.units import OffloadUnit


class Updates(Protocol):
    """Updates of units that may be under way beside the step. `early`: they may begin inside backward."""

    early: bool

    def begin_step(self) -> None:
        """A step begins. Raises RuntimeError where updates of the last one have begun and nothing has ended it."""
        ...

    def before_onload(self, unit: OffloadUnit) -> None:
        """Makes the copy of the unit that is queued next on h2d come after the unit's updates.

        Blocks the host while the host itself still updates the unit.
        """
        ...

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Tells whether `before_onload` would block the host."""
        ...

    def retain_gradient(self, unit: OffloadUnit, tensor: UnitTensor, gradient: PendingFree) -> bool:
        """Takes charge of a gradient's device memory, whose copy home is queued; False leaves it to the caller."""
        ...

    def gradient_landed(self, unit: OffloadUnit, tensor: UnitTensor, after: Sequence[Event]) -> None:
        """A gradient is final and its copy home is queued: its update may begin, once the events `after` are past."""
        ...

    def end_step(self) -> None:
        """A step is over, and the device is idle."""
        ...

    def counters(self) -> Counters:
        """Returns totals since construction."""
        ...

    def close(self) -> None:
        """Makes the updates that have begun, and no others from now on."""
        ...


class NoUpdates:
    """`Updates` of an optimizer that works between steps."""

    early = False

    def begin_step(self) -> None:
        pass

    def before_onload(self, unit: OffloadUnit) -> None:
        pass

    def is_pending(self, unit: OffloadUnit) -> bool:
        return False

    def retain_gradient(self, unit: OffloadUnit, tensor: UnitTensor, gradient: PendingFree) -> bool:
        return False

    def gradient_landed(self, unit: OffloadUnit, tensor: UnitTensor, after: Sequence[Event]) -> None:
        pass

    def end_step(self) -> None:
        pass

    def counters(self) -> Counters:
        return Counters()

    def close(self) -> None:
        pass


NO_UPDATES = NoUpdates()
