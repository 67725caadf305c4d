"""Which of the saved activations are worth their way to the host: arithmetic over the record of the step before."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol


class Fate(Enum):
    """What became of a saved span in a step."""

    UNUSED = "never asked for"
    RELEASED = "its memory was free in between"
    HELD = "somebody else kept its memory"
    LINGERED = "it was asked for before its memory was let go"
    STAYED = "it was left on the device"


@dataclass(eq=False)
class Candidate:
    """A span that could be swapped, as the policy sees it.

    `saved_at` and `used_at` count the saves and uses of a step together; `kept`: it stayed within the budget.
    """

    ordinal: int
    nbytes: int
    saved_at: int
    used_at: int | None = None
    kept: bool = False
    fate: Fate = Fate.UNUSED


class Choice(Enum):
    """What to do with a span that is about to be saved."""

    SWAP = "copy it to the host"
    KEEP = "keep it on the device, within the budget"
    LEAVE = "leave it where it is, for a copy would free nothing"


class SwapPolicy(Protocol):
    """Chooses by the number of a span in the order of saving. `budget` is how many bytes may stay on the device."""

    budget: int

    def choose(self, ordinal: int, nbytes: int, room: int) -> Choice:
        """The choice for span number `ordinal` of the step; `room` is what the budget has left."""
        ...

    def learn(self, record: Sequence[Candidate], stall_ms: float, step_ms: float | None) -> None:
        """A step is over: its candidates in order, the time that compute stood still for them and its length.

        `step_ms` is None on a device without a clock.
        """
        ...


class FixedBudget:
    """Keeps `budget` bytes: of what backward is about to use, that which it uses first.

    The order of a step is known after it, so the first swaps everything. What somebody else kept alive last time is
    not swapped again: rope tables, a tensor that the caller holds.
    """

    def __init__(self, budget: int = 0):
        self.budget = budget
        self._kept: set[int] = set()
        # By number, with the size by which a span is known again.
        self._freed_nothing: dict[int, int] = {}

    def choose(self, ordinal: int, nbytes: int, room: int) -> Choice:
        if self._freed_nothing.get(ordinal) == nbytes:
            return Choice.LEAVE
        return Choice.KEEP if ordinal in self._kept and nbytes <= room else Choice.SWAP

    def learn(self, record: Sequence[Candidate], stall_ms: float, step_ms: float | None) -> None:
        self._freed_nothing = {
            candidate.ordinal: candidate.nbytes
            for candidate in record
            if candidate.fate is Fate.HELD or self._freed_nothing.get(candidate.ordinal) == candidate.nbytes
        }
        self._kept = used_first(self._worth_it(record), self.budget)

    def _worth_it(self, record: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in record if candidate.ordinal not in self._freed_nothing]


class AutomaticBudget(FixedBudget):
    """Swaps only as much as the copies can hide behind compute, found by measuring.

    The first step swaps everything and is not measured: its host memory is being page-locked. Each of the next
    `TRIALS` steps swaps a share of the bytes. A share is hidden where compute stood still for at most `TOLERANCE` of
    the step. If everything is hidden, that is it. Else the next share is what fits the time in which compute ran,
    bytes being copied evenly over the step, less a margin; from there it goes half the way to the least share that
    was not hidden, or down by a third where nothing has been hidden yet. The largest share that was found hidden is
    kept for good, as a budget in bytes; if none was, nothing is swapped. So a slow moment costs memory, never time.
    Without a clock everything is swapped.
    """

    TRIALS = 6
    TOLERANCE = 0.01
    MARGIN = 0.9
    CLOSE_ENOUGH = 0.05

    def __init__(self) -> None:
        super().__init__(0)
        self.settled = False
        self._share = 1.0
        self._hidden, self._not_hidden = 0.0, 1.0
        self._steps = 0

    def learn(self, record: Sequence[Candidate], stall_ms: float, step_ms: float | None) -> None:
        if step_ms is not None and record and not self.settled:
            self._steps += 1
            if self._steps > 1:
                self._judge(stall_ms, step_ms)
            self.budget = math.ceil((1 - self._share) * peak_bytes(self._worth_it(record)))
        super().learn(record, stall_ms, step_ms)

    def _judge(self, stall_ms: float, step_ms: float) -> None:
        hidden = stall_ms <= self.TOLERANCE * step_ms
        if hidden:
            self._hidden = self._share
        else:
            self._not_hidden = self._share
        narrow = self._not_hidden - self._hidden <= self.CLOSE_ENOUGH
        if self._hidden == 1.0 or narrow or self._steps == 1 + self.TRIALS:
            self._share, self.settled = self._hidden, True
        elif self._hidden:
            self._share = (self._hidden + self._not_hidden) / 2
        elif self._share == 1.0:
            self._share = self.MARGIN * (1 - min(stall_ms / step_ms, 1.0))
        else:
            self._share *= 2 / 3


def used_first(record: Sequence[Candidate], budget: int) -> set[int]:
    """The numbers of the candidates to keep so that never more than `budget` bytes of kept ones are alive at once.

    Whenever a step turns from saving to using, what was saved since the last turn is taken in the order of its use:
    what would be needed soonest stays (Belady 1966). Candidates that were never used are not kept.
    """
    kept, alive, fresh = set(), 0, []
    for candidate, is_use in _in_order(record):
        if not is_use:
            fresh.append(candidate)
            continue
        wanted = [saved for saved in fresh if saved.used_at is not None]
        for saved in sorted(wanted, key=lambda saved: saved.used_at):
            if alive + saved.nbytes <= budget:
                kept.add(saved.ordinal)
                alive += saved.nbytes
        fresh = []
        if candidate.ordinal in kept:
            alive -= candidate.nbytes
    return kept


def peak_bytes(record: Sequence[Candidate]) -> int:
    """The most bytes of candidates that were alive at once, from being saved to being used; of those used at all."""
    alive = peak = 0
    for candidate, is_use in _in_order(record):
        if candidate.used_at is not None:
            alive += -candidate.nbytes if is_use else candidate.nbytes
            peak = max(peak, alive)
    return peak


def _in_order(record: Sequence[Candidate]) -> list[tuple[Candidate, bool]]:
    """The saves (False) and uses (True) of candidates in the order in which they happened."""
    saves = [(candidate.saved_at, candidate, False) for candidate in record]
    uses = [(candidate.used_at, candidate, True) for candidate in record if candidate.used_at is not None]
    return [(candidate, is_use) for _, candidate, is_use in sorted(saves + uses, key=lambda entry: entry[0])]
