"""The table of swapped spans: which are alive, which are used next, and how much is back ahead of use."""

from __future__ import annotations

import weakref
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator

import torch

from offload.activations.host_pool import PooledBlock
from offload.activations.policy import SpanRecord
from offload.activations.step_record import StepRecord
from offload.activations.swapped_span import ByteRange, ReleasedSpan, SwappedSpan
from offload.activations.use_order import UseOrder


class SpanTable:
    """Weak references to the swapped spans, numbered in the order in which they were saved.

    Autograd alone keeps spans alive, and may drop them at any time, in any thread. The memory of a dead span waits in
    `released` until the swapper takes it with `pop_released`. `ahead_bytes` are on the device before backward asked.
    """

    def __init__(self) -> None:
        self.released: deque[ReleasedSpan] = deque()
        self.ahead_bytes = 0
        self.next_serial = 0
        self._spans: list[tuple[int, weakref.ref[SwappedSpan]]] = []
        self._use_order = UseOrder()

    def add(
        self, record: SpanRecord, byte_range: ByteRange, storage: torch.UntypedStorage, block: PooledBlock
    ) -> SwappedSpan:
        """Makes the span of `byte_range` of `storage`, which goes to `block`."""
        serial = self.next_serial
        # An interrupt may come between any two lines: then a span that is not in the table dies.
        self.next_serial += 1
        span = SwappedSpan(serial, record, byte_range, storage, block, self.released)
        self._spans.append((serial, weakref.ref(span)))
        return span

    def pop_released(self) -> ReleasedSpan:
        """Removes a dead span from the table. Returns what it left."""
        released = self.released.popleft()
        index = self._index(released.serial)
        if index < len(self._spans) and self._spans[index][0] == released.serial:
            del self._spans[index]
        self.ahead_bytes -= released.ahead_bytes
        return released

    def alive(self) -> list[SwappedSpan]:
        """Returns the spans that are alive, in the order of saving."""
        return [span for _, reference in self._spans if (span := reference()) is not None]

    def mark_ahead(self, span: SwappedSpan, is_ahead: bool) -> None:
        """Notes whether `span` is on the device before backward asked for it."""
        if span.is_ahead != is_ahead:
            span.is_ahead = is_ahead
            self.ahead_bytes += span.byte_range.nbytes if is_ahead else -span.byte_range.nbytes

    def used_after(self, record: SpanRecord, step: StepRecord, serial: int) -> Iterator[SwappedSpan | None]:
        """Returns the spans that backward will use after `record`, soonest first; a dead span is None.

        The order is that of the step before, if `record` is of `step`, the current one, and the two are alike.
        Otherwise it is the reverse order of saving, from the span before number `serial` on.
        """
        if step.has_new_spans:
            self._use_order.expect([span for span in self.alive() if span.serial >= step.first_serial])
            step.has_new_spans = False
        known = self._use_order.after(record) if record in step else None
        return known or (self._spans[index][1]() for index in range(self._index(serial) - 1, -1, -1))

    def learn(self, step: StepRecord) -> None:
        """Takes the order of use from `step`, which is over."""
        self._use_order.learn(step.spans)

    def _index(self, serial: int) -> int:
        return bisect_left(self._spans, serial, key=lambda entry: entry[0])
