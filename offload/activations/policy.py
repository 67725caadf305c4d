"""The choice of the activations that are worth a copy to the host: arithmetic over the record of the step before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple


class Outcome(Enum):
    """The result of saving a span in a step."""

    UNUSED = "backward did not ask for it"
    RELEASED = "its device memory was free until backward asked for it"
    REFERENCED = "its device memory was not free: somebody else still referenced it"
    STASHED = "backward asked for it before its device memory was released"
    STAYED = "it was not swapped"


@dataclass(eq=False)
class SpanRecord:
    """One span that was saved in a step, whether it was swapped or not: number `index` in the order of saving.

    `saved_at` and `used_at` count the saves and uses of the step together; `used_at` is None until backward asks for
    the span. `kept`: it stayed on the device within the budget.
    """

    index: int
    nbytes: int
    saved_at: int
    used_at: int | None = None
    kept: bool = False
    outcome: Outcome = Outcome.UNUSED


class Pause(NamedTuple):
    """A span of `nbytes` that is not swapped for `num_steps` steps, until step `until`: a copy would free nothing."""

    nbytes: int
    num_steps: int
    until: int


class Choice(Enum):
    """The treatment of a span that is about to be saved."""

    SWAP = "copy it to the host"
    KEEP = "keep it on the device, within the budget"
    LEAVE = "leave it on the device, outside of the budget: a copy would free nothing"


class FixedBudget:
    """Keeps at most `budget` bytes on the device: the spans that backward uses first, known after the first step.

    A span whose memory somebody else still references (a rope table) is not swapped again, but for another try after
    `RETRY_STEPS` steps, after twice as many, and so on; and after a step that saved other sizes. `measures`: `learn`
    needs the length of the step, for which the host waits until it is over.
    """

    RETRY_STEPS = 16
    measures = False

    def __init__(self, budget: int = 0):
        self.budget = budget
        self._kept: set[int] = set()
        # By index.
        self._paused: dict[int, Pause] = {}
        self._sizes: list[int] = []
        self._num_steps = 0

    def begin_step(self, free_bytes: Callable[[], int | None]) -> None:
        """Begins a step. `free_bytes()` returns the free bytes of the device, None where they are not known."""

    def choose(self, index: int, nbytes: int, room: int) -> Choice:
        """Returns the choice for span number `index` of the step; `room` is what is left of the budget in bytes."""
        pause = self._paused.get(index)
        if pause is not None and pause.nbytes == nbytes:
            return Choice.SWAP if self._num_steps >= pause.until else Choice.LEAVE
        return Choice.KEEP if index in self._kept and nbytes <= room else Choice.SWAP

    def learn(
        self, record: Sequence[SpanRecord], stall_ms: float, step_ms: float | None, host_grew: bool = False
    ) -> None:
        """Learns from a step that is over: `record` has its spans in the order of saving.

        `stall_ms` is how long compute waited for copies, `step_ms` how long the step took. `step_ms` is None on a
        device without a clock, and where `measures` is False; `stall_ms` may then be that of an earlier step.
        `host_grew`: new host memory was page-locked in the step.
        """
        self._num_steps += 1
        sizes_before, self._sizes = self._sizes, [span.nbytes for span in record]
        if self._sizes != sizes_before:
            self._paused = {}
        for span in record:
            if span.outcome is Outcome.REFERENCED:
                earlier = self._paused.get(span.index)
                num_steps = 2 * earlier.num_steps if earlier else self.RETRY_STEPS
                self._paused[span.index] = Pause(span.nbytes, num_steps, self._num_steps + num_steps)
            elif span.outcome in (Outcome.RELEASED, Outcome.STASHED):
                self._paused.pop(span.index, None)
        self._kept = used_first(self._worth_a_copy(record), self.budget)

    def _worth_a_copy(self, record: Sequence[SpanRecord]) -> list[SpanRecord]:
        return [span for span in record if span.index not in self._paused]


class AutomaticBudget(FixedBudget):
    """Swaps the share of the bytes that copies can hide behind compute, found by measuring.

    The first step keeps what there is room for, `KEPT_OF_FREE` of the device's free memory, and shows how much could be
    swapped. Then at most `TRIALS` shares of that are tried, from `FIRST` (or what has no room) on. A share is hidden if
    compute stood still for at most `TOLERANCE` of the step. Shares grow by `GROWTH` until one is not hidden, and then
    halve the distance between the largest hidden and the smallest other, until these are `CLOSE_ENOUGH`. The largest
    hidden share is kept for good, as a budget in bytes: one slow moment costs memory, never time, and little is
    page-locked in vain (half a second a GB).

    A step that page-locks memory proves nothing, as the host is slow then: the share is tried again, and after
    `PATIENCE` such steps counts as not hidden. On a device without a clock, or of unknown memory, everything is
    swapped.
    """

    measures = True
    FIRST = 1 / 8
    GROWTH = 1.5
    TRIALS = 10
    PATIENCE = 4
    TOLERANCE = 0.01
    KEPT_OF_FREE = 0.6
    CLOSE_ENOUGH = 0.05

    def __init__(self) -> None:
        super().__init__(0)
        self._first_budget = 0
        self._share: float | None = None
        self._hidden = 0.0
        self._not_hidden: float | None = None
        self._num_trials = 0
        self._num_grown = 0

    def begin_step(self, free_bytes: Callable[[], int | None]) -> None:
        """Takes the budget of the first step from the free memory."""
        if self._share is None:
            self._first_budget = self.budget = int(self.KEPT_OF_FREE * (free_bytes() or 0))

    def choose(self, index: int, nbytes: int, room: int) -> Choice:
        choice = super().choose(index, nbytes, room)
        is_first_step = self._share is None and choice is Choice.SWAP
        return Choice.KEEP if is_first_step and nbytes <= room else choice

    def learn(
        self, record: Sequence[SpanRecord], stall_ms: float, step_ms: float | None, host_grew: bool = False
    ) -> None:
        if self.measures and step_ms is None:
            self.budget = 0
        elif self.measures and record:
            all_bytes = peak_bytes(self._worth_a_copy(record))
            if self._share is None:
                # Bytes for which the device has no room are swapped, hidden or not.
                self._hidden = max(0.0, 1 - self._first_budget / all_bytes) if all_bytes else 0.0
                self._share = min(self._hidden + self.FIRST, 1.0)
            else:
                self._num_grown = self._num_grown + 1 if host_grew else 0
                if not host_grew or self._num_grown > self.PATIENCE:
                    self._try_next(not host_grew and stall_ms <= self.TOLERANCE * step_ms)
            self.budget = math.ceil((1 - self._share) * all_bytes)
        super().learn(record, stall_ms, step_ms)

    def _try_next(self, was_hidden: bool) -> None:
        """Notes whether the current share was hidden, and chooses the next, or settles."""
        self._num_trials += 1
        if was_hidden:
            self._hidden = self._share
        else:
            self._not_hidden = self._share
        is_close = self._not_hidden is not None and self._not_hidden - self._hidden <= self.CLOSE_ENOUGH
        if self._hidden == 1.0 or is_close or self._num_trials == self.TRIALS:
            self._share, self.measures = self._hidden, False
        elif self._not_hidden is None:
            self._share = min(self.GROWTH * self._share, 1.0)
        else:
            self._share = (self._hidden + self._not_hidden) / 2


def used_first(record: Sequence[SpanRecord], budget: int) -> set[int]:
    """Returns the indices of the spans to keep, so that at most `budget` bytes of kept spans are alive at any time.

    Whenever a step turns from saving to using, the spans saved since the last turn are taken in the order of their
    use: those that are needed soonest stay (Belady 1966). Spans that were never used are not kept.
    """
    kept, alive_bytes, new = set(), 0, []
    for span, is_use in _in_order(record):
        if not is_use:
            new.append(span)
            continue
        used = [saved for saved in new if saved.used_at is not None]
        for saved in sorted(used, key=lambda saved: saved.used_at):
            if alive_bytes + saved.nbytes <= budget:
                kept.add(saved.index)
                alive_bytes += saved.nbytes
        new = []
        if span.index in kept:
            alive_bytes -= span.nbytes
    return kept


def peak_bytes(record: Sequence[SpanRecord]) -> int:
    """Returns the most bytes that were alive at once, from save to use, of the spans that were used at all."""
    alive_bytes = peak = 0
    for span, is_use in _in_order(record):
        if span.used_at is not None:
            alive_bytes += -span.nbytes if is_use else span.nbytes
            peak = max(peak, alive_bytes)
    return peak


def _in_order(record: Sequence[SpanRecord]) -> list[tuple[SpanRecord, bool]]:
    """Returns the saves (False) and uses (True) of spans in the order in which they happened."""
    saves = [(span.saved_at, span, False) for span in record]
    uses = [(span.used_at, span, True) for span in record if span.used_at is not None]
    return [(span, is_use) for _, span, is_use in sorted(saves + uses, key=lambda entry: entry[0])]
