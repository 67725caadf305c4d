"""When units are used: pure arithmetic over unit numbers, with no tensor and no stream in it."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterable, Sequence

from offload.sizes import parse_bytes


class Itinerary:
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


def keep_resident(sizes: Sequence[int], amount: str | int) -> set[int]:
    """Which of the units of `sizes` bytes stay on the device, spread evenly over the order of use.

    `amount` is a number of units (`4`), a share of the bytes (`25%`) or bytes (`2GiB`, `512MiB`). The choice is a
    function of its arguments alone and never exceeds the amount. The first unit is in it, if any is: a step starts
    with its weights and ends with its gradients, and nothing computes while these are copied. Raises ValueError for
    an amount that is none.
    """
    text = str(amount).strip()
    if text.isdigit():
        count = int(text)
        if count > len(sizes):
            raise ValueError(f"offload.resident={amount}: the model has {len(sizes)} units")
        return {k * len(sizes) // count for k in range(count)}
    budget = _budget_bytes(text, sum(sizes))
    share = budget / max(sum(sizes), 1)
    # Owed so much at the start that the first unit is the first to be kept.
    kept, owed = set(), (1 - share) * sizes[0] if sizes else 0.0
    for index, size in enumerate(sizes):
        owed += share * size
        if owed + 1e-6 * size >= size <= budget:
            kept.add(index)
            owed -= size
            budget -= size
    return kept


def _budget_bytes(text: str, total: int) -> int:
    share = text.removesuffix("%")
    try:
        if share == text:
            return parse_bytes("offload.resident", text)
        if 0 <= float(share) <= 100:
            return int(float(share) * total / 100)
    except ValueError:
        pass
    raise ValueError(
        f"offload.resident={text}: give a number of units (4), a share (25%, up to 100%) or bytes (2GiB, 512MiB)"
    )
