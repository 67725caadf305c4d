"""Which gradients are final as they land, so that their weights may be updated while backward goes on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from offload.unit import OffloadUnit, UnitTensor


class FinalGradients:
    """What the step before says of this one, gradient by gradient.

    Trusted are units in which every tensor trains, every gradient landed once (under reentrant checkpoints what is
    used twice gets it in pieces, none of them known to be the last), and no weight was needed after its gradient, as
    a frozen one or one that is used detached may be. While not `counting`, nothing is final and nothing is learned.
    """

    def __init__(self) -> None:
        self.counting = False
        self._landed: Counter[UnitTensor] = Counter()
        self._needed_late: set[OffloadUnit] = set()
        self._trusted: set[OffloadUnit] = set()

    def begin_step(self, units: Iterable[OffloadUnit]) -> None:
        """A step of these units begins."""
        self._trusted = {
            unit
            for unit in units
            if unit not in self._needed_late and all(self._landed[tensor] == 1 for tensor in unit.tensors)
        }
        self._landed.clear()
        self._needed_late.clear()

    def end_step(self) -> None:
        self.counting = False

    def land(self, unit: OffloadUnit, tensor: UnitTensor) -> bool:
        """A gradient lands: whether it is final. Raises RuntimeError where an earlier one was taken for final."""
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
        """A weight is used, in a step or between two. Raises RuntimeError where its gradient was taken for final."""
        if not self.counting or not self._landed[tensor]:
            return
        if unit in self._trusted:
            raise RuntimeError(
                f"{tensor.name} is needed after its gradient, which it was not in the step before: its update may have"
                " begun. Where uses change from step to step, let updates begin after backward (early=False), and"
                " checkpoints be use_reentrant=False"
            )
        self._needed_late.add(unit)
