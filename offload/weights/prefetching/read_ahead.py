"""Tells which units will be copied in next, and in which order: arithmetic over unit numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence


def coming_in(uses: Sequence[int], held: Iterable[int], slots: int, count: int) -> list[int]:
    """Returns the first `count` units that `uses`, from the next use on, copy into `slots` slots.

    `held` are the units that are in slots now. A unit in a slot is not copied; where no slot is free, the one whose
    next use is farthest makes way (Belady 1966), as in `Prefetcher`.
    """
    held, found = list(held), []
    for place, unit in enumerate(uses):
        if len(found) == count:
            break
        if unit in held:
            continue
        found.append(unit)
        if len(held) >= slots:
            held.remove(max(held, key=lambda other: _next_use(other, uses, place)))
        held.append(unit)
    return found


def _next_use(unit: int, uses: Sequence[int], place: int) -> float:
    return next((later for later in range(place + 1, len(uses)) if uses[later] == unit), math.inf)
