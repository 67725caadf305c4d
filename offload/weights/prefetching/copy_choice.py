"""Chooses how sharers bring units in: each copies in its slices and gathers the others', or each copies whole units.

Slices take 1/N of the time of each device's bus. Their gathers take multiprocessors of the device, which products run
more slowly without. Whole units need no gather: they are faster where the bus has time for them, which depends on the
model, the tokens of a step and the machine. Both bring the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter

from offload.sharing.sharers import CopyWay

# What the first steps try, whole units or not, and whether their time counts. In the first the order of units is not
# known, and a step after a change of the way may wait for what the one before has left.
TRIALS = ((False, False), (False, False), (False, True), (False, True), (True, False), (True, True), (True, True))


class CopyChoice:
    """Whether this process would copy whole units in, step by step. `auto` times some steps of both ways.

    A step lasts until the next begins. Where evaluations or checkpoints lie between two, the faster of a way's steps
    counts. Processes that time differently choose differently: units come in whole where all of them would.
    """

    def __init__(self, copies: CopyWay, clock: Callable[[], float] = perf_counter):
        self.whole = copies == "whole"
        self._clock = clock
        self._trials = iter(TRIALS) if copies == "auto" else None
        self._counts = False
        self._began = 0.0
        self._fastest = {False: float("inf"), True: float("inf")}

    def begin_step(self) -> None:
        """Sets `whole` for the step that begins."""
        if self._trials is None:
            return
        now = self._clock()
        if self._counts:
            self._fastest[self.whole] = min(self._fastest[self.whole], now - self._began)
        self._began = now
        trial = next(self._trials, None)
        if trial is None:
            self.whole, self._trials = self._fastest[True] < self._fastest[False], None
        else:
            self.whole, self._counts = trial
