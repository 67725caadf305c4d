"""Counters add up over the parts of a mode, and a difference is what happened in between."""

from dataclasses import fields

from offload.streams.counters import LEVELS, Counters


def distinct(factor: int) -> Counters:
    return Counters(**{entry.name: factor * (index + 1) for index, entry in enumerate(fields(Counters))})


def test_parts_of_a_mode_add_up_levels_too():
    assert distinct(2) + distinct(3) == distinct(5)
    assert distinct(2) + Counters() == distinct(2)


def test_a_difference_is_the_growth_and_has_the_levels_of_the_later_reading():
    later, earlier = distinct(5), distinct(3)
    grown = later - earlier
    for entry in fields(Counters):
        expected = distinct(5) if entry.name in LEVELS else distinct(2)
        assert getattr(grown, entry.name) == getattr(expected, entry.name), entry.name


def test_what_nobody_times_stays_unknown():
    unknown = Counters(stall_ms=None, h2d_bytes=3)
    assert (unknown + Counters(stall_ms=1.0)).stall_ms is None
    assert (Counters(stall_ms=1.0) + unknown).stall_ms is None
    assert (unknown - unknown).stall_ms is None
    assert (unknown + unknown).h2d_bytes == 6
