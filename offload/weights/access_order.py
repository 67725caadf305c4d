"""When units are used: pure arithmetic over unit numbers, with no tensor and no stream in it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence


class AccessOrder:
    """The order in which a step visits its units, recorded in one step and replayed in the next.

    `position` is the index of the current visit, -1 before the first. A step that departs from the record is
    followed where the record has the unit later on (visits were skipped), and recorded anew.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = -1
        self._trace: list[int] = []
        self._uses: dict[int, list[int]] = {}

    def begin(self) -> None:
        """A step begins: back to the start of the record."""
        self.position, self._trace = -1, []

    def visit(self, unit: int) -> None:
        """The step now uses `unit`; repeated visits in a row count once."""
        if self._trace and self._trace[-1] == unit:
            return
        self._trace.append(unit)
        position = self.next_use(unit)
        if position < math.inf:
            self.position = position

    def end(self) -> None:
        """The step is over: what it did is the record for the next, unless it merely stopped early."""
        if self._trace != self.order[: len(self._trace)]:
            self.order = self._trace
            self._uses = {}
            for position, unit in enumerate(self.order):
                self._uses.setdefault(unit, []).append(position)
        self.begin()

    def next_use(self, unit: int) -> float:
        """The position of the next visit to `unit` after the current one, infinity when none is known."""
        uses = self._uses.get(unit, ())
        following = bisect_left(uses, self.position + 1)
        return uses[following] if following < len(uses) else math.inf

    def first_use(self, unit: int) -> float:
        """The position of the first visit to `unit` in a step; of units that are not in the record, its number."""
        uses = self._uses.get(unit)
        return uses[0] if uses else len(self.order) + unit

    def upcoming(self, count: int) -> Sequence[int]:
        """The next `count` visits after the current one."""
        return self.order[self.position + 1 : self.position + 1 + count]

    def farthest(self, units: Iterable[int]) -> int | None:
        """Of `units`, the one whose next use is latest (Belady 1966); None of none."""
        return max(units, key=self.next_use, default=None)
