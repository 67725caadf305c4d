"""The order of uses that repeats itself, as that of forwards in a row: what followed last time will follow again."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

# Uses that are remembered, at least: more than a forward of any model has, and little memory.
REMEMBERED = 2**16


class RepeatedOrder:
    """Forecasts uses of units from the last time that the current one was used.

    What came between that time and now is a cycle, which is expected to go on: after the last unit of a forward comes
    the first of the next. A use that departs from it is looked up anew: where it last came after the same unit as now,
    else where it was last. So one forward, models that take turns, and any other pattern are known after one round; the
    idea is that of LZ77 (Ziv and Lempel 1977).
    """

    def __init__(self) -> None:
        self._trace: list[int] = []
        # Where each unit is in the trace, and where it was last after another.
        self._places: dict[int, list[int]] = {}
        self._after: dict[tuple[int, int], int] = {}
        # The use in the trace that corresponds to the current one, the last in it.
        self._match: int | None = None

    @property
    def is_known(self) -> bool:
        """True if there is a forecast."""
        return self._match is not None

    def record(self, unit: int) -> None:
        """Records the use of `unit`; repeated uses in a row count once."""
        if self._trace and self._trace[-1] == unit:
            return
        if self._match is not None and self._trace[self._match + 1] == unit:
            self._match += 1
        else:
            self._match = self._last_place(unit)
        self._append(unit)
        if len(self._trace) >= 2 * REMEMBERED:
            self._forget()

    def depart(self) -> None:
        """Forecasts nothing until a use is recorded of a unit that was used before."""
        self._match = None

    def upcoming(self, count: int) -> Sequence[int]:
        """Returns the units of the next `count` uses; fewer if the cycle is shorter."""
        if self._match is None:
            return []
        ahead = self._trace[self._match + 1 : self._match + 1 + count]
        cycle = len(self._trace) - 1 - self._match
        # Past the end of the trace the cycle begins again.
        again = min(count, cycle) - len(ahead)
        return ahead + self._trace[self._match + 1 : self._match + 1 + again]

    def next_use(self, unit: int) -> float:
        """Returns how many uses ahead the next one of `unit` is, infinity if it is not in the cycle."""
        if self._match is None:
            return math.inf
        places = self._places.get(unit, [])
        following = bisect_right(places, self._match)
        return places[following] - self._match if following < len(places) else math.inf

    def farthest(self, units: Iterable[int]) -> int | None:
        """Returns the one of `units` whose next use is latest, the first of them if nothing is known; None for none."""
        return max(units, key=self.next_use, default=None)

    def _last_place(self, unit: int) -> int | None:
        if unit not in self._places:
            return None
        return self._after.get((self._trace[-1], unit), self._places[unit][-1])

    def _append(self, unit: int) -> None:
        place = len(self._trace)
        self._places.setdefault(unit, []).append(place)
        if self._trace:
            self._after[self._trace[-1], unit] = place
        self._trace.append(unit)

    def _forget(self) -> None:
        first = len(self._trace) - REMEMBERED
        match, kept = self._match, self._trace[first:]
        self.__init__()
        for unit in kept:
            self._append(unit)
        if match is not None and match >= first:
            self._match = match - first
