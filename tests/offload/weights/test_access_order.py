"""The order of use, and what to keep."""

from __future__ import annotations

import math

import pytest

from offload.weights.access_order import AccessOrder
from offload.weights.partition import keep_resident


def replay(order: AccessOrder, visits: list[int]) -> None:
    order.begin()
    for unit in visits:
        order.record(unit)
    order.end()


def test_the_first_step_is_recorded_without_repeats():
    order = AccessOrder()
    replay(order, [0, 0, 1, 2, 2, 1, 0])
    assert order.order == [0, 1, 2, 1, 0]
    assert list(order.upcoming(2)) == [0, 1]


def test_next_use_counts_from_the_current_visit():
    order = AccessOrder()
    replay(order, [0, 1, 2, 1, 0])
    order.begin()
    order.record(0)
    assert [order.next_use(unit) for unit in (0, 1, 2, 7)] == [4, 1, 2, math.inf]
    assert order.farthest([1, 0, 2]) == 0
    assert order.farthest([]) is None
    order.record(1)
    order.record(2)
    assert list(order.upcoming(5)) == [1, 0]


def test_skipped_visits_are_followed_and_relearned():
    order = AccessOrder()
    replay(order, [0, 1, 2, 3, 2, 1, 0])
    order.begin()
    order.record(0)
    order.record(3)
    assert list(order.upcoming(2)) == [2, 1]
    order.record(0)
    order.end()
    assert order.order == [0, 3, 0]


def test_a_step_that_stops_early_keeps_the_record():
    order = AccessOrder()
    replay(order, [0, 1, 2, 1, 0])
    replay(order, [0, 1])
    assert order.order == [0, 1, 2, 1, 0]


def test_an_unknown_unit_leaves_the_position_alone():
    order = AccessOrder()
    replay(order, [0, 1])
    order.begin()
    order.record(0)
    order.record(9)
    assert list(order.upcoming(1)) == [1]


@pytest.mark.parametrize(
    ("amount", "kept"),
    [("0", set()), (0, set()), (2, {0, 5}), (10, set(range(10))), ("0%", set()), ("100%", set(range(10)))],
)
def test_resident_by_count_and_share(amount: str | int, kept: set[int]):
    assert keep_resident([100] * 10, amount) == kept


@pytest.mark.parametrize("amount", ["700B", "1KiB", "33%", "90%"])
def test_resident_bytes_are_spread_and_never_exceeded(amount: str):
    sizes = [100, 50, 150] * 8
    budget = {"700B": 700, "1KiB": 1024, "33%": 0.33 * sum(sizes), "90%": 0.9 * sum(sizes)}[amount]
    kept = keep_resident(sizes, amount)
    total = sum(sizes[index] for index in kept)
    assert budget - max(sizes) < total <= budget
    assert 0 in kept
    halves = [sum(sizes[index] for index in kept if (index < 12) == first) for first in (True, False)]
    assert abs(halves[0] - halves[1]) <= max(sizes)


@pytest.mark.parametrize("amount", ["lots", "101%", "-1GiB", "GiB", 11, "1.5"])
def test_resident_out_of_range_is_refused(amount: str | int):
    with pytest.raises(ValueError, match=r"resident="):
        keep_resident([1] * 10, amount)
