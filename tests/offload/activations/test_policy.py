"""Policies choose the spans to swap, by arithmetic over the record of a step."""

import itertools
import random
from collections.abc import Sequence

import pytest

from offload.activations.policy import AutomaticBudget, Choice, FixedBudget, Outcome, SpanRecord, peak_bytes, used_first

MS_PER_BYTE = 0.01


def record(events: str, sizes: dict[str, int] | None = None) -> list[SpanRecord]:
    """Makes a record from a string: the first time a letter occurs it saves a span, the second time it uses it."""
    found: dict[str, SpanRecord] = {}
    for time, letter in enumerate(events):
        if letter not in found:
            nbytes = (sizes or {}).get(letter, 10)
            found[letter] = SpanRecord(len(found), nbytes, saved_at=time)
        else:
            found[letter].used_at, found[letter].outcome = time, Outcome.RELEASED
    return list(found.values())


@pytest.mark.parametrize(
    ("events", "budget", "kept"),
    [
        ("abcddcba", 0, ""),
        ("abcddcba", 25, "cd"),
        ("abcddcba", 40, "abcd"),
        # Two microbatches, one after the other: each has the whole budget.
        ("abbacddc", 10, "bd"),
        # Two forwards before a backward share it.
        ("abcddcba", 10, "d"),
        # Saved in the middle of backward: spans of before that are still alive count.
        ("abcceeba", 10, "ce"),
        ("abccdedeba", 20, "bcd"),
        # Never used: not worth a byte of the budget.
        ("abcba", 20, "ab"),
        ("abc", 20, ""),
    ],
)
def test_what_is_used_first_stays(events: str, budget: int, kept: str):
    letters = list(dict.fromkeys(events))
    assert {letters[index] for index in used_first(record(events), budget)} == set(kept)


def test_the_budget_is_never_exceeded():
    generator = random.Random(0)
    for _ in range(200):
        order, alive, events = list("abcdefghijkl"), [], ""
        while order or alive:
            if order and (not alive or generator.random() < 0.6):
                alive.append(order.pop(0))
                events += alive[-1]
            else:
                events += alive.pop(generator.randrange(len(alive)))
        sizes = {letter: generator.randrange(1, 20) for letter in "abcdefghijkl"}
        spans = record(events, sizes)
        kept = used_first(spans, 40)
        assert peak_bytes([span for span in spans if span.index in kept]) <= 40


def test_the_peak_is_of_what_is_alive_at_once():
    assert peak_bytes(record("abbacddc")) == 20
    assert peak_bytes(record("abcddcba")) == 40
    assert peak_bytes(record("abc")) == 0


def test_the_first_step_swaps_everything_and_the_next_what_is_over_budget():
    policy = FixedBudget(20)
    assert all(policy.choose(index, 10, 20) is Choice.SWAP for index in range(4))
    policy.learn(record("abcddcba"), 0.0, None)
    assert [policy.choose(index, 10, 20) for index in range(4)] == [Choice.SWAP] * 2 + [Choice.KEEP] * 2
    # Another number of tokens: a span that does not fit is swapped.
    assert policy.choose(2, 30, 20) is Choice.SWAP
    assert policy.choose(2, 15, 20) is Choice.KEEP


def test_a_span_that_frees_nothing_is_left_as_long_as_its_size_is_the_same():
    policy = FixedBudget(0)
    first = record("abba")
    first[0].outcome = Outcome.REFERENCED
    policy.learn(first, 0.0, None)
    assert [policy.choose(index, 10, 0) for index in range(2)] == [Choice.LEAVE, Choice.SWAP]
    stayed = record("abba")
    stayed[0].outcome = Outcome.STAYED
    policy.learn(stayed, 0.0, None)
    assert policy.choose(0, 10, 0) is Choice.LEAVE
    assert policy.choose(0, 11, 0) is Choice.SWAP
    policy.learn(record("abba", {"a": 11}), 0.0, None)
    assert policy.choose(0, 10, 0) is Choice.SWAP


def test_a_span_that_others_referenced_is_tried_again():
    policy = FixedBudget(20)
    held = record("abba")
    held[0].outcome = Outcome.REFERENCED
    policy.learn(held, 0.0, None)
    choices = []
    for _ in range(2 * FixedBudget.RETRY_STEPS):
        choices.append(policy.choose(0, 10, 20))
        step = record("abba")
        step[0].outcome = {Choice.LEAVE: Outcome.STAYED, Choice.KEEP: Outcome.STAYED, Choice.SWAP: Outcome.RELEASED}[
            choices[-1]
        ]
        policy.learn(step, 0.0, None)
    assert choices[: FixedBudget.RETRY_STEPS + 1] == [Choice.LEAVE] * FixedBudget.RETRY_STEPS + [Choice.SWAP]
    # It is worth a copy after all, and then kept within the budget.
    assert set(choices[FixedBudget.RETRY_STEPS + 1 :]) == {Choice.KEEP}


@pytest.mark.parametrize("budget", [0, 20])
def test_a_span_that_others_still_reference_is_tried_ever_more_rarely(budget: int):
    policy = FixedBudget(budget)
    tried = []
    for number in range(16 * FixedBudget.RETRY_STEPS):
        step = record("abba")
        swapped = policy.choose(0, 10, budget) is Choice.SWAP
        step[0].outcome = Outcome.REFERENCED if swapped else Outcome.STAYED
        if swapped:
            tried.append(number)
        policy.learn(step, 0.0, None)
    waits = [later - earlier - 1 for earlier, later in itertools.pairwise(tried)]
    assert waits == [FixedBudget.RETRY_STEPS * factor for factor in (1, 2, 4, 8)]


def test_another_sequence_of_sizes_ends_all_pauses():
    policy = FixedBudget(0)
    held = record("abba")
    held[0].outcome = Outcome.REFERENCED
    policy.learn(held, 0.0, None)
    policy.learn(record("abccba"), 0.0, None)
    assert policy.choose(0, 10, 0) is Choice.SWAP


def test_a_span_that_others_reference_takes_nothing_of_the_budget():
    policy = FixedBudget(10)
    step = record("abba")
    step[1].outcome = Outcome.REFERENCED
    policy.learn(step, 0.0, None)
    assert [policy.choose(index, 10, 10) for index in range(2)] == [Choice.KEEP, Choice.LEAVE]


def test_steps_that_always_lock_memory_do_not_measure_for_ever():
    """With sequences of another length in every step, no measurement would be valid in the next."""
    policy = AutomaticBudget()
    policy.begin_step(lambda: 0)
    steps = 0
    while policy.measures:
        policy.learn(record("abcddcba"), 0.0, 1.0, host_grew=True)
        steps += 1
        assert steps < 100
    assert not policy.measures


def run(
    policy: AutomaticBudget, hideable: float, steps: int, noise: Sequence[float] = (), free: int | None = 10_000
) -> list[float]:
    """Runs steps on a machine that hides copies of the share `hideable` of a step's bytes. Returns the shares swapped.

    A step saves 1,000 bytes, and the device has `free` bytes free. A step that page-locks memory takes so long that it
    hides everything.
    """
    letters = "".join(chr(0x4E00 + number) for number in range(100))
    compute_ms, shares, locked = 100 * 10 * MS_PER_BYTE, [], 0
    for step in range(steps):
        policy.begin_step(lambda: free)
        spans = record(letters + letters[::-1])
        room, swapped = policy.budget, 0
        for span in spans:
            choice = policy.choose(span.index, span.nbytes, room)
            room -= span.nbytes if choice is Choice.KEEP else 0
            swapped += choice is Choice.SWAP
        shares.append(swapped / 100)
        stall_ms = max(0.0, shares[-1] / hideable - 1) * compute_ms
        stall_ms += (noise[step] if step < len(noise) else 0.0) * compute_ms
        grew, locked = swapped > locked, max(swapped, locked)
        if grew:
            policy.learn(spans, 0.0, 40 * compute_ms, grew)
        else:
            policy.learn(spans, stall_ms, compute_ms + stall_ms)
    return shares


@pytest.mark.parametrize("hideable", [0.1, 0.28, 0.5, 0.9])
def test_auto_settles_in_a_few_steps_on_most_of_what_can_be_hidden(hideable: float):
    policy = AutomaticBudget()
    shares = run(policy, hideable, 20)
    assert shares[0] == 0.0
    assert not policy.measures
    assert len(set(shares[17:])) == 1
    assert hideable - 0.06 <= shares[-1] <= 1.02 * hideable
    # Each trial page-locks memory: not much more than is used in the end.
    assert max(shares) <= max(1.6 * hideable, 0.2)


@pytest.mark.parametrize(("hideable", "share"), [(2.0, 1.0), (0.001, 0.0)])
def test_auto_swaps_all_or_nothing_where_that_costs_no_time_or_hides_none(hideable: float, share: float):
    policy = AutomaticBudget()
    assert run(policy, hideable, 16)[-1] == share
    assert not policy.measures


def test_auto_swaps_bytes_without_room_on_the_device_although_copies_cannot_be_hidden():
    policy = AutomaticBudget()
    # 60% of 1,000 bytes stay.
    shares = run(policy, 0.1, 12, free=1000)
    assert shares[0] == 0.4
    assert not policy.measures
    assert shares[-1] == 0.4
    assert min(shares) >= 0.4


def test_noise_costs_memory_and_not_time():
    for seed in range(50):
        generator = random.Random(seed)
        noise = [generator.choice([0, 0, 0, 0.05, 0.5]) for _ in range(20)]
        policy = AutomaticBudget()
        shares = run(policy, 0.3, 24, noise)
        assert not policy.measures
        assert shares[-1] <= 1.02 * 0.3
        assert len(set(shares[20:])) == 1


def test_the_first_step_and_steps_without_activations_are_not_measured():
    policy = AutomaticBudget()
    policy.learn([], 50.0, 100.0)
    shares = run(policy, 2.0, 16, noise=[3.0])
    assert shares[0] == 0.0
    assert shares[-1] == 1.0


def test_auto_without_a_clock_swaps_everything():
    policy = AutomaticBudget()
    for free in (None, *[1000] * 10):
        policy.begin_step(lambda free=free: free)
        policy.learn(record("abba"), 50.0, None)
        assert policy.budget == 0
        assert policy.choose(1, 10, policy.budget) is Choice.SWAP


def test_auto_swaps_everything_where_free_memory_is_not_known():
    assert run(AutomaticBudget(), 0.1, 3, free=None) == [1.0] * 3
