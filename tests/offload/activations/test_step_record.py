"""The record of a step counts saves and uses together, and knows its own spans from those of other steps."""

from __future__ import annotations

from offload.activations.step_record import StepRecord


def test_spans_are_numbered_and_timed_in_the_order_of_saving():
    step = StepRecord()
    first, second = step.add(10), step.add(20)
    first.used_at = step.tick()
    third = step.add(30)
    assert [(span.index, span.nbytes, span.saved_at) for span in step.spans] == [(0, 10, 1), (1, 20, 2), (2, 30, 4)]
    assert step.spans == [first, second, third]
    assert first.used_at == 3


def test_a_span_of_another_step_is_not_taken_for_one_of_this():
    before, step = StepRecord(), StepRecord()
    old, new = before.add(10), step.add(10)
    assert old in before
    assert new in step
    assert old not in step
    assert before.add(10) not in step


def test_a_new_record_starts_from_nothing():
    step = StepRecord(first_serial=5, stall_ms=2.5)
    assert (step.first_serial, step.stall_ms, step.started) == (5, 2.5, None)
    assert (step.kept_bytes, step.unpacked_bytes, step.has_new_spans, step.spans) == (0, 0, False, [])
