"""The results of the cases of one part of the survey."""

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
        planned: the cases that were to run.
        until: the time.monotonic() at which the part ends, with the cases that it has.
        kinds: how many cases were of each kind.
        wrong: one line for each case that did not do what it must.
    """

    part: str
    planned: int
    until: float
    kinds: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.kinds.total()

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind}" for kind, count in self.kinds.items())
        return f"{self.part}: {self.cases} of {self.planned} cases ({kinds}), {len(self.wrong)} wrong"

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
