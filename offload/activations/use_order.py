"""The order in which backward uses swapped spans, learned from the step before."""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections.abc import Iterator, Sequence

from offload.activations.policy import SpanRecord
from offload.activations.swapped_span import SwappedSpan


class UseOrder:
    """Predicts which spans are used after a given one.

    A span is recognised from step to step by its index in the order of saving, and its size. Nothing is predicted in
    a step that saves a span which the step before did not save and use.
    """

    def __init__(self) -> None:
        self._used_at: dict[tuple[int, int], int] = {}
        self._times: list[int] = []
        self._spans: list[weakref.ref[SwappedSpan]] = []
        self._is_known = False

    def learn(self, records: Sequence[SpanRecord]) -> None:
        """Takes the order of the step that just ended, given its records in the order of saving."""
        self._used_at = {(r.index, r.nbytes): r.used_at for r in records if r.used_at is not None}
        self.expect([])

    def expect(self, spans: Sequence[SwappedSpan]) -> None:
        """Sorts the spans that were saved in this step so far by their use in the step before."""
        times = [self._used_at.get((span.record.index, span.record.nbytes)) for span in spans]
        self._is_known = None not in times and bool(self._used_at)
        pairs = sorted(zip(times, spans, strict=True), key=lambda pair: pair[0]) if self._is_known else []
        self._times = [time for time, _ in pairs]
        self._spans = [weakref.ref(span) for _, span in pairs]

    def after(self, record: SpanRecord) -> Iterator[SwappedSpan | None] | None:
        """Returns the expected spans that are used after `record`, in order; a dead span is None.

        Returns None where the step before tells nothing about this step or about `record`.
        """
        used_at = self._used_at.get((record.index, record.nbytes))
        if not self._is_known or used_at is None:
            return None
        return (self._spans[index]() for index in range(bisect_right(self._times, used_at), len(self._times)))
