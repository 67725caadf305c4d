"""The units that come in next: those that are not in slots, with Belady's choice of the one that is replaced."""

from __future__ import annotations

import pytest

from offload.weights.prefetching.read_ahead import coming_in


@pytest.mark.parametrize(
    ("uses", "held", "slots", "count", "expected"),
    [
        # Forward, some of it there.
        ([3, 4, 5, 6], [2, 3], 2, 3, [4, 5, 6]),
        # The turn: what is in slots then is used without a copy, and what has made way comes again.
        ([4, 5, 4, 3, 2, 1], [3, 2, 4], 3, 4, [5, 2, 1]),
        ([1, 2, 1, 2], [], 2, 5, [1, 2]),
        ([1, 2, 1, 2], [], 1, 5, [1, 2, 1, 2]),
        ([1, 2, 3], [], 2, 0, []),
        ([], [1], 2, 4, []),
    ],
)
def test_units_come_in_as_the_prefetcher_will_copy_them(uses, held, slots, count, expected):
    assert coming_in(uses, held, slots, count) == expected
