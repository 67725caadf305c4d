"""The orders in which a step, and forwards in a row, use units."""

import math
import random

import pytest

from offload.weights.prefetching import access_order
from offload.weights.prefetching.access_order import AccessOrder, RepeatedOrder


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


def after(uses: list[int]) -> RepeatedOrder:
    order = RepeatedOrder()
    for unit in uses:
        order.record(unit)
    return order


def unforeseen(order: RepeatedOrder, uses: list[int]) -> int:
    """Records the uses, and counts those that were not the next one of the forecast."""
    count = 0
    for unit in uses:
        count += list(order.upcoming(1)) != [unit]
        order.record(unit)
    return count


def test_the_first_unit_of_a_forward_comes_after_the_last_from_the_second_forward_on():
    order = after([0, 1, 2, 3])
    assert not order.is_known
    assert list(order.upcoming(3)) == []
    assert order.farthest([2, 1]) == 2
    order.record(0)
    assert list(order.upcoming(3)) == [1, 2, 3]
    assert unforeseen(order, [1, 2, 3, *[0, 1, 2, 3] * 20]) == 0


def test_a_unit_that_is_used_twice_in_a_forward_is_no_end_of_it():
    forward = [0, 1, 2, 0, 3]
    order = after([*forward, *forward])
    assert unforeseen(order, forward * 5) == 0


def test_models_that_take_turns_are_known_after_one_round():
    encoder, decoder = [0, 1, 2], [3, 4]
    order = after([*encoder, *decoder * 3, *encoder, *decoder])
    # The first of the decoders was followed by another.
    assert unforeseen(order, [*decoder * 2, *encoder]) == 0
    assert unforeseen(order, [*decoder * 3, *encoder, *decoder]) == 0


def test_repeated_uses_in_a_row_count_once():
    order = after([0, 0, 1, 1, 0, 1, 1])
    assert list(order.upcoming(2)) == [0, 1]


def test_next_use_goes_around_the_cycle():
    order = after([9, 0, 1, 2, 3, 0, 1])
    assert [order.next_use(unit) for unit in (2, 3, 0, 1)] == [1, 2, 3, 4]
    assert order.next_use(9) == math.inf
    assert order.farthest([2, 0, 3]) == 0
    assert order.farthest([2, 9, 0]) == 9
    assert order.farthest([]) is None
    # No more than the cycle has.
    assert list(order.upcoming(9)) == [2, 3, 0, 1]


def test_what_departs_from_the_forecast_is_looked_up_anew():
    order = after([0, 1, 2, 3, 4, 0, 1])
    order.record(3)
    assert list(order.upcoming(2)) == [4, 0]
    order.record(7)
    assert not order.is_known
    order.record(2)
    assert list(order.upcoming(2)) == [3, 4]


def test_a_unit_that_is_used_twice_is_found_where_it_came_after_the_same_one():
    order = after([0, 1, 2, 3, 1, 4, 9, 0])
    order.record(1)
    assert list(order.upcoming(1)) == [2]
    order.record(9)
    order.record(3)
    order.record(1)
    assert list(order.upcoming(1)) == [4]


def test_a_departure_ends_the_forecast_until_the_next_use():
    order = after([0, 1, 2, 0, 1])
    order.depart()
    assert list(order.upcoming(1)) == []
    order.record(2)
    assert list(order.upcoming(1)) == [0]


def test_old_uses_are_forgotten_and_the_forecast_stays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(access_order, "REMEMBERED", 64)
    order = after([0, 1, 2, 3, 4] * 2)
    assert unforeseen(order, [0, 1, 2, 3, 4] * 200) == 0
    assert len(order._trace) < 128
    # Uses that follow no order are remembered no longer.
    generator = random.Random(0)
    for _ in range(1000):
        order.record(generator.randrange(50))
        assert len(order._trace) < 128
        assert all(0 <= unit < 50 for unit in order.upcoming(9))
