"""The results of the cases of one part of the survey."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


@dataclass
class Outcome:
    """The cases of one part, and what was wrong with some.

    Attributes:
        expected: what every case of the part must do, in a few words.
        planned: the cases that were to run.
        until: the time.monotonic() at which the part ends, with the cases that it has.
        kinds: how many cases were of each kind.
        wrong: one line for each case that did not do what it must.
    """

    part: str
    expected: str
    planned: int
    until: float
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def cases(self) -> int:
        return self.kinds.total()

    @property
    def good(self) -> int:
        """The cases that did what they must."""
        return max(self.cases - len(self.wrong), 0)

    def add(self, kind: str, case: str, problem: str | None) -> None:
        """Counts a case; `problem` is what was wrong with it."""
        self.kinds[kind] += 1
        if problem is not None:
            self.wrong.append(f"{self.part}: {case}: {problem}")
            print(f"WRONG {self.wrong[-1]}", flush=True)

    def in_time(self, cases: Iterable[T]) -> Iterator[T]:
        """Yields the cases for as long as there is time."""
        for case in cases:
            if time.monotonic() > self.until:
                return
            yield case

    def figures(self) -> dict:
        """Returns the outcome as plain values."""
        return {
            "cases": self.cases,
            "planned": self.planned,
            "as_expected": self.good,
            "expected": self.expected,
            "kinds": dict(self.kinds),
            "wrong": self.wrong,
            "seconds": round(self.seconds, 1),
        }


def table(outcomes: Iterable[Outcome]) -> str:
    """Returns the outcomes as a table in Markdown."""
    lines = ["| fault | cases | as expected | expected | s |", "|---|---|---|---|---|"]
    for outcome in outcomes:
        kinds = ", ".join(f"{count} {kind}" for kind, count in outcome.kinds.items())
        count = f"{outcome.cases}" if outcome.cases == outcome.planned else f"{outcome.cases} of {outcome.planned}"
        lines.append(
            f"| {outcome.part} | {count} ({kinds}) | {outcome.good} | {outcome.expected} | {outcome.seconds:.0f} |"
        )
    return "\n".join(lines)
