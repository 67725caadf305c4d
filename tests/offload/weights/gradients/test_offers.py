"""Offers have one length, whatever is ready."""

from __future__ import annotations

from offload.weights.gradients.offers import NOTHING, SUMS_AT_ONCE, offer


def test_an_offer_has_the_oldest_and_is_filled_up():
    assert offer([]) == (NOTHING,) * SUMS_AT_ONCE
    assert offer([7, 3]) == (7, 3, *[NOTHING] * (SUMS_AT_ONCE - 2))
    assert offer(list(range(9))) == tuple(range(SUMS_AT_ONCE))
