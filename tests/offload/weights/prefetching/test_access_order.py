"""The order in which a step uses units."""

from __future__ import annotations

import math

from offload.weights.prefetching.access_order import AccessOrder


def replay(order: AccessOrder, uses: list[int]) -> None:
    order.begin()
    for unit in uses:
        order.record(unit)
    order.end()


def test_the_first_step_is_recorded_without_repeats():
    order = AccessOrder()
    replay(order, [0, 0, 1, 2, 2, 1, 0])
    assert order.order == [0, 1, 2, 1, 0]
    assert list(order.upcoming(2)) == [0, 1]


def test_next_use_counts_from_the_current_use():
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


def test_skipped_uses_are_followed_and_recorded_anew():
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


def test_first_use_is_by_the_record_and_else_by_number():
    order = AccessOrder()
    assert [order.first_use(unit) for unit in (0, 3)] == [0, 3]
    replay(order, [2, 1, 2, 0])
    assert [order.first_use(unit) for unit in (2, 1, 0, 7)] == [0, 1, 3, 11]


def test_forwards_in_the_first_step_are_the_forecast_of_the_next():
    order = AccessOrder()
    order.begin()
    for unit in [0, 1, 2, 0, 1]:
        order.record(unit)
    assert list(order.upcoming(3)) == [2, 0, 1]
    assert [order.next_use(unit) for unit in (2, 0, 1)] == [1, 2, 3]
    assert order.farthest([2, 1]) == 1


def test_a_step_of_more_forwards_than_the_last_goes_on_after_the_record():
    order = AccessOrder()
    replay(order, [0, 1, 2] * 2)
    order.begin()
    for unit in [0, 1, 2] * 2:
        order.record(unit)
    # The record ends here, as a step may.
    assert list(order.upcoming(2)) == []
    order.record(0)
    assert list(order.upcoming(2)) == [1, 2]


def test_what_backward_computes_again_is_not_taken_for_a_forward():
    order = AccessOrder()
    order.begin()
    for unit in (0, 1, 2, 3):
        order.record(unit)
    for unit in (1, 2):
        order.record(unit, in_backward=True)
        assert list(order.upcoming(1)) == []
