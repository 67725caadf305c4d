"""What sharers tell each other, in an exchange, of gradients that are ready to be summed."""

from __future__ import annotations

from collections.abc import Sequence

# What may be summed at one exchange, of each kind, and the number that stands for none.
SUMS_AT_ONCE = 4
NOTHING = -1


def offer(numbers: Sequence[int]) -> tuple[int, ...]:
    """Returns the first SUMS_AT_ONCE of `numbers`, with NOTHING in the place of those that are missing."""
    first = numbers[:SUMS_AT_ONCE]
    return (*first, *[NOTHING] * (SUMS_AT_ONCE - len(first)))
