"""Whole units or slices: as given, or as some steps of both were faster."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from offload.weights.prefetching.copy_choice import TRIALS, CopyChoice


def chosen(copies: str, durations: Sequence[float]) -> list[bool]:
    """Returns the choice for each step; a step takes the duration of its number."""
    times = iter([sum(durations[:step]) for step in range(len(durations))])
    choice = CopyChoice(copies, lambda: next(times))
    found = []
    for _ in durations:
        choice.begin_step()
        found.append(choice.whole)
    return found


@pytest.mark.parametrize(("copies", "whole"), [("slices", False), ("whole", True)])
def test_what_is_given_is_never_changed(copies: str, whole: bool):
    assert chosen(copies, [1, 2, 3, 9, 1, 1, 1, 1, 1]) == [whole] * 9


@pytest.mark.parametrize(
    ("durations", "whole"),
    [
        ([9, 9, 5, 5, 9, 4, 4], True),
        ([9, 9, 4, 4, 9, 5, 5], False),
        # One step of each way was disturbed: the fastest counts.
        ([1, 1, 5, 5, 1, 90, 4], True),
        ([1, 1, 90, 4, 1, 5, 5], False),
        # Without a difference slices stay.
        ([1, 1, 5, 5, 1, 5, 5], False),
    ],
)
def test_the_faster_way_stays_for_good(durations: list[float], whole: bool):
    tried = [trial for trial, _ in TRIALS]
    assert chosen("auto", [*durations, 1, 99, 1]) == [*tried, whole, whole, whole]


def test_steps_that_are_not_counted_decide_nothing():
    fast_start, fast_change = [0, 0, 5, 5, 9, 4, 4, 1], [9, 9, 4, 4, 0, 5, 5, 1]
    assert chosen("auto", fast_start)[-1] is True
    assert chosen("auto", fast_change)[-1] is False
