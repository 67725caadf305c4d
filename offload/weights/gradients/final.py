"""Tells which gradients are final: nothing will be added to them in this step, and no weight is needed after them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

from offload.weights.units.unit import OffloadUnit, UnitTensor

KEEP = "keep gradients (optimizer.gradients=keep; in a loop of your own, AttachOptions(release_gradients=False))"


class NotFinalError(RuntimeError):
    """A gradient is not the last, or a weight is needed after it, where its update may have begun."""

    def __init__(self, problem: str, remedy: str):
        super().__init__(problem, remedy)
        self.problem, self.remedy = problem, remedy

    def __str__(self) -> str:
        return f"{self.problem}: {self.remedy}"


class FinalGradients:
    """Tells which gradients are final as they land, by what the step before showed.

    `all_final`: all are from the first step on, where gradients are released.

    Units are trusted in which every tensor trains, every gradient landed once in that step (under reentrant checkpoints
    a parameter that is used twice gets its gradient in pieces, none of them known to be the last), and no weight was
    needed after its gradient (as a frozen one may be, or one that is used detached). While `counting` is False, no
    gradient is final and nothing is learned.

    `take_back`, of `Updates`, undoes the updates that have begun, where that is possible, and else returns False. It is
    called where a step shows that a gradient was taken for final and is not; no other of that step is final then.
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
        self._trusted = {unit for unit in units if self._all_final or self._was_final(unit)}
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

    def _was_final(self, unit: OffloadUnit) -> bool:
        return unit not in self._needed_late and all(self._landed[tensor] == 1 for tensor in unit.tensors)

    def _retract(self) -> bool:
        if not self.take_back():
            return False
        self._trusted.clear()
        return True
