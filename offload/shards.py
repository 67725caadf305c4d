"""How blocks are packed into shards: pure arithmetic over their sizes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise


def pack(sizes: Sequence[int], count: int, limit: float = math.inf) -> list[range]:
    """Cuts blocks of `sizes` bytes into `count` contiguous runs of about equal bytes, none of them empty.

    The sum of the squares of the runs' bytes is the least there is; of equals, later runs are the longer. A run of
    several blocks has at most `limit` bytes. Returns the indices of each run. Raises ValueError where it cannot be.
    """
    total = [0]
    for size in sizes:
        total.append(total[-1] + size)

    def cost(start: int, stop: int) -> float:
        nbytes = total[stop] - total[start]
        return nbytes**2 if nbytes <= limit or stop - start == 1 else math.inf

    # best[stop]: of the ways to cut sizes[:stop] into as many runs as rounds so far, the cheapest, and its cuts.
    best: dict[int, tuple[float, list[int]]] = {0: (0, [0])}
    for _ in range(count):
        longer: dict[int, tuple[float, list[int]]] = {}
        for start, (so_far, cuts) in sorted(best.items()):
            for stop in range(start + 1, len(sizes) + 1):
                price = so_far + cost(start, stop)
                if price < longer.get(stop, (math.inf,))[0]:
                    longer[stop] = price, [*cuts, stop]
        best = longer
    if len(sizes) not in best:
        raise ValueError(f"{len(sizes)} blocks cannot be cut into {count} runs of at most {limit} bytes")
    cuts = best[len(sizes)][1]
    return [range(start, stop) for start, stop in pairwise(cuts)]


def shards_needed(sizes: Sequence[int], limit: int) -> int:
    """The fewest contiguous runs of at most `limit` bytes; a block that is larger is a run of its own."""
    count, room = 0, -1
    for size in sizes:
        if size > room:
            count, room = count + 1, limit
        room -= size
    return count
