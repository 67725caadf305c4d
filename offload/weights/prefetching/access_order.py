"""The order in which a step, and forwards in a row, use units: arithmetic over unit numbers, without tensors."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterable, Sequence

# Uses that are remembered, at least: more than a forward of any model has, and little memory.
REMEMBERED = 2**16
_NEVER = (math.inf,)


class RepeatedOrder:
    """Forecasts uses of units from the last time that the current one was used.

    What came since then is expected to come again: after the last unit of a forward the first of the next. Another use
    is looked up where it last came after the same unit as now, else where it was last. So any pattern is known after
    one round, as in LZ77 (Ziv and Lempel 1977).
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
            places = self._places.get(unit)
            self._match = None if places is None else self._after.get((self._trace[-1], unit), places[-1])
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


class AccessOrder:
    """The uses of units in the order of a step, recorded in one step and taken as the forecast of the next.

    `order` is the record, and `position` the index in it of the current use, -1 before the first. A step that departs
    from the record is looked up where the record has the unit later on (uses were skipped), and recorded anew. Where
    the record does not have it, as in the first step, the step's own forwards so far are the forecast of the next.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.position = -1
        self._trace: list[int] = []
        # The positions of each unit in the record, and infinity behind them.
        self._uses: dict[int, list[float]] = {}
        self._is_in_record = True
        self._forwards = RepeatedOrder()
        # The step's own forwards, where they are the forecast.
        self._by_forwards: RepeatedOrder | None = None

    def begin(self) -> None:
        """Begins a step at the start of the record."""
        self.position, self._trace, self._is_in_record = -1, [], True
        self._forwards, self._by_forwards = RepeatedOrder(), None

    def record(self, unit: int, in_backward: bool = False) -> None:
        """Records that the step now uses `unit`, in a forward or a backward; repeated uses in a row count once."""
        if in_backward:
            # A block that is computed again is not followed by the next one.
            self._forwards.depart()
        else:
            self._forwards.record(unit)
        if not self._trace or self._trace[-1] != unit:
            self._trace.append(unit)
            position = self._next_in_record(unit)
            self._is_in_record = position < math.inf
            if self._is_in_record:
                self.position = position
        self._by_forwards = None if self._is_in_record or not self._forwards.is_known else self._forwards

    def end(self) -> None:
        """Ends the step. Its uses are the record for the next one, unless the step merely stopped early."""
        if self._trace != self.order[: len(self._trace)]:
            self.order = self._trace
            self._uses = {}
            for position, unit in enumerate(self.order):
                self._uses.setdefault(unit, []).append(position)
            for uses in self._uses.values():
                uses.append(math.inf)
        self.begin()

    def next_use(self, unit: int) -> float:
        """Returns the place of the next use of `unit` among those to come, infinity when none is known."""
        return self._next_in_record(unit) if self._by_forwards is None else self._by_forwards.next_use(unit)

    def _next_in_record(self, unit: int) -> float:
        uses = self._uses.get(unit, _NEVER)
        return uses[bisect_right(uses, self.position)]

    def first_use(self, unit: int) -> float:
        """Returns the position of the first use of `unit` in a step; units without a record come last, by number."""
        uses = self._uses.get(unit)
        return uses[0] if uses else len(self.order) + unit

    def upcoming(self, count: int) -> Sequence[int]:
        """Returns the units of the next `count` uses after the current one."""
        if self._by_forwards is not None:
            return self._by_forwards.upcoming(count)
        return self.order[self.position + 1 : self.position + 1 + count]

    def farthest(self, units: Iterable[int]) -> int | None:
        """Returns the one of `units` whose next use is latest (Belady 1966), None if there are none."""
        next_use = self._next_in_record if self._by_forwards is None else self._by_forwards.next_use
        return max(units, key=next_use, default=None)
