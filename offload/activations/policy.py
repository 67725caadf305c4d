"""Which of the saved activations are worth their way to the host: arithmetic over the record of the step before."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol


class Fate(Enum):
    """What became of a saved span in a step."""

    UNUSED = "never asked for"
    RELEASED = "its memory was free in between"
    HELD = "somebody else kept its memory"
    STASHED = "it was asked for before its memory was let go"
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


class Held(NamedTuple):
    """A span that somebody else keeps, known again by its size: left alone for `wait` steps, until step `until`."""

    nbytes: int
    wait: int
    until: int


class Choice(Enum):
    """What to do with a span that is about to be saved."""

    SWAP = "copy it to the host"
    KEEP = "keep it on the device, within the budget"
    LEAVE = "leave it where it is, for a copy would free nothing"


class SwapPolicy(Protocol):
    """Chooses by the number of a span in the order of saving. `budget` is how many bytes may stay on the device.

    `measures`: `learn` is to be told times, which are only known when a step is over.
    """

    budget: int
    measures: bool

    def begin_step(self, free_bytes: Callable[[], int | None]) -> None:
        """A step begins; `free_bytes()` is what the device has to spare (None: that is not known)."""
        ...

    def choose(self, ordinal: int, nbytes: int, room: int) -> Choice:
        """The choice for span number `ordinal` of the step; `room` is what the budget has left."""
        ...

    def learn(
        self, record: Sequence[Candidate], stall_ms: float, step_ms: float | None, host_grew: bool = False
    ) -> None:
        """A step is over: its candidates in order, the time that compute stood still for them and its length.

        `step_ms` is None on a device without a clock and where nobody measures, where `stall_ms` is that of some step
        before. `host_grew`: new host memory was page-locked in the step.
        """
        ...


class FixedBudget:
    """Keeps `budget` bytes: of what backward is about to use, that which it uses first.

    The order of a step is known after it, so the first swaps everything. What somebody else kept alive last time is
    not swapped again: rope tables, a tensor that the caller holds. Whether it is still kept shows only a copy, so it is
    tried again after `RETRY_STEPS` steps, after twice as many the next time, and so on; and at once where a step saved
    other sizes than the one before.
    """

    RETRY_STEPS = 16
    measures = False

    def __init__(self, budget: int = 0):
        self.budget = budget
        self._kept: set[int] = set()
        # By number.
        self._held: dict[int, Held] = {}
        self._sizes: list[int] = []
        self._steps = 0

    def begin_step(self, free_bytes: Callable[[], int | None]) -> None:
        """The budget does not depend on it."""

    def choose(self, ordinal: int, nbytes: int, room: int) -> Choice:
        held = self._held.get(ordinal)
        if held is not None and held.nbytes == nbytes:
            return Choice.SWAP if self._steps >= held.until else Choice.LEAVE
        return Choice.KEEP if ordinal in self._kept and nbytes <= room else Choice.SWAP

    def learn(
        self, record: Sequence[Candidate], stall_ms: float, step_ms: float | None, host_grew: bool = False
    ) -> None:
        self._steps += 1
        before, self._sizes = self._sizes, [candidate.nbytes for candidate in record]
        if self._sizes != before:
            self._held = {}
        for candidate in record:
            if candidate.fate is Fate.HELD:
                earlier = self._held.get(candidate.ordinal)
                wait = 2 * earlier.wait if earlier else self.RETRY_STEPS
                self._held[candidate.ordinal] = Held(candidate.nbytes, wait, self._steps + wait)
            elif candidate.fate in (Fate.RELEASED, Fate.STASHED):
                self._held.pop(candidate.ordinal, None)
        self._kept = used_first(self._worth_it(record), self.budget)

    def _worth_it(self, record: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in record if candidate.ordinal not in self._held]


class AutomaticBudget(FixedBudget):
    """Swaps only as much as the copies can hide behind compute, found by measuring.

    The first step keeps what there is room for, `KEPT_OF_FREE` of the device's free memory, and is not measured: it
    shows how much could be swapped. Then shares of these bytes are tried, at most `TRIALS`, from `FIRST` (or what has
    no room) on. A share is hidden where compute stood still for at most `TOLERANCE` of the step. A step that
    page-locks memory says nothing, as the host holds it up and copies have all the time they want: the same share is
    tried again, unless `PATIENCE` steps have done so in a row, which then counts as not hidden. Shares grow by
    `GROWTH` until one is not hidden, then go half the way between the greatest that was and the least that was not.
    The greatest that was hidden is kept for good, as a budget in bytes. So a slow moment costs memory, never time; and
    never much more is page-locked than will be used, which takes half a second a GB. Without a clock, and where free
    memory is not known, everything is swapped.
    """

    FIRST = 1 / 8
    GROWTH = 1.5
    TRIALS = 10
    PATIENCE = 4
    TOLERANCE = 0.01
    KEPT_OF_FREE = 0.6
    CLOSE_ENOUGH = 0.05

    def __init__(self) -> None:
        super().__init__(0)
        self.settled = False
        self._most = 0
        self._share: float | None = None
        self._hidden = 0.0
        self._not_hidden: float | None = None
        self._trials = 0
        self._grown = 0

    @property
    def measures(self) -> bool:
        return not self.settled

    def begin_step(self, free_bytes: Callable[[], int | None]) -> None:
        if self._share is None:
            self._most = self.budget = int(self.KEPT_OF_FREE * (free_bytes() or 0))

    def choose(self, ordinal: int, nbytes: int, room: int) -> Choice:
        choice = super().choose(ordinal, nbytes, room)
        unknown = self._share is None and choice is Choice.SWAP
        return Choice.KEEP if unknown and nbytes <= room else choice

    def learn(
        self, record: Sequence[Candidate], stall_ms: float, step_ms: float | None, host_grew: bool = False
    ) -> None:
        if self.measures and step_ms is None:
            self.budget = 0
        elif self.measures and record:
            whole = peak_bytes(self._worth_it(record))
            if self._share is None:
                # What has no room is swapped, hidden or not.
                self._hidden = max(0.0, 1 - self._most / whole) if whole else 0.0
                self._share = min(self._hidden + self.FIRST, 1.0)
            else:
                self._grown = self._grown + 1 if host_grew else 0
                if not host_grew or self._grown > self.PATIENCE:
                    self._judge(not host_grew and stall_ms <= self.TOLERANCE * step_ms)
            self.budget = math.ceil((1 - self._share) * whole)
        super().learn(record, stall_ms, step_ms)

    def _judge(self, hidden: bool) -> None:
        self._trials += 1
        if hidden:
            self._hidden = self._share
        else:
            self._not_hidden = self._share
        narrow = self._not_hidden is not None and self._not_hidden - self._hidden <= self.CLOSE_ENOUGH
        if self._hidden == 1.0 or narrow or self._trials == self.TRIALS:
            self._share, self.settled = self._hidden, True
        elif self._not_hidden is None:
            self._share = min(self.GROWTH * self._share, 1.0)
        else:
            self._share = (self._hidden + self._not_hidden) / 2


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
