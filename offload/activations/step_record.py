"""The record of one step of activation swapping: made anew when a step begins, read when it ends."""

from __future__ import annotations

from offload.activations.policy import SpanRecord
from offload.activations.storages import ExcludedStorages, SavedStorages
from offload.streams.registry import Event


class StepRecord:
    """The spans of one step, and what is known of the step so far.

    `spans` are the records in the order of saving, `saved` finds the spans by storage, `excluded` are the storages
    that are not swapped in this step. The swapped spans from `first_serial` on are of this step, and `has_new_spans`
    tells that some were saved since their order of use was last looked up. `kept_bytes` stay on the
    device within the budget, `unpacked_bytes` were unpacked since the last save. `started` and `stall_ms` are the time
    when the step began, and how long compute had stood still by then, in all steps.
    """

    def __init__(self, first_serial: int = 0, stall_ms: float = 0.0, started: Event | None = None):
        self.spans: list[SpanRecord] = []
        self.saved = SavedStorages()
        self.excluded = ExcludedStorages()
        self.first_serial = first_serial
        self.has_new_spans = False
        self.kept_bytes = 0
        self.unpacked_bytes = 0
        self.stall_ms = stall_ms
        self.started = started
        self._ticks = 0

    def __contains__(self, record: SpanRecord) -> bool:
        return record in self.spans[record.index : record.index + 1]

    def add(self, nbytes: int) -> SpanRecord:
        """Records that a span of `nbytes` is saved now."""
        record = SpanRecord(len(self.spans), nbytes, saved_at=self.tick())
        self.spans.append(record)
        return record

    def tick(self) -> int:
        """Returns the time of the next save or use: saves and uses of a step are counted together."""
        self._ticks += 1
        return self._ticks
