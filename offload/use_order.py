"""In which order saved spans will be used: as in the step before, where this one went alike so far."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from offload.parcels import Parcel
from offload.swap_policy import Candidate


class UseOrder:
    """Learned from the record of a step. A span is known again by its number in the order of saving, and its size."""

    def __init__(self) -> None:
        self._used_at: dict[tuple[int, int], int] = {}
        self._times: list[int] = []
        self._parcels: list[weakref.ref[Parcel]] = []
        self._alike = False

    def learn(self, record: Sequence[Candidate]) -> None:
        """A step is over: its candidates in order."""
        self._used_at = {(c.ordinal, c.nbytes): c.used_at for c in record if c.used_at is not None}
        self.expect([])

    def expect(self, parcels: Sequence[Parcel]) -> None:
        """These have been saved in this step, and may all be used."""
        times = [self._used_at.get((parcel.candidate.ordinal, parcel.candidate.nbytes)) for parcel in parcels]
        self._alike = None not in times and bool(self._used_at)
        pairs = sorted(zip(times, parcels, strict=True), key=lambda pair: pair[0]) if self._alike else []
        self._times = [time for time, _ in pairs]
        self._parcels = [weakref.ref(parcel) for _, parcel in pairs]

    def after(self, candidate: Candidate) -> Iterator[Parcel | None] | None:
        """Those that are used after `candidate`, a dead one as None; None where the step before tells nothing."""
        used_at = self._used_at.get((candidate.ordinal, candidate.nbytes))
        if not self._alike or used_at is None:
            return None
        return (self._parcels[index]() for index in range(bisect_right(self._times, used_at), len(self._parcels)))
