"""The table of swapped spans: what is alive, what is used next, what dead spans leave behind."""

from __future__ import annotations

import pytest
import torch

from offload.activations import span_table
from offload.activations.host_pool import PooledBlock
from offload.activations.span_table import SpanTable
from offload.activations.step_record import StepRecord
from offload.activations.swapped_span import ByteRange, SwappedSpan
from offload.memory.host_memory import HostBlock


def swapped(table: SpanTable, step: StepRecord, nbytes: int) -> SwappedSpan:
    """A span of `nbytes` that is saved and swapped now."""
    step.has_new_spans = True
    block = PooledBlock(HostBlock(nbytes, "test"))
    return table.add(step.add(nbytes), ByteRange(0, nbytes), torch.zeros(nbytes).untyped_storage(), block)


def coming(table: SpanTable, step: StepRecord, span: SwappedSpan) -> list[SwappedSpan | None]:
    return list(table.used_after(span.record, step, span.serial))


def test_a_dead_span_leaves_its_block_and_its_place():
    table, step = SpanTable(), StepRecord()
    spans = [swapped(table, step, nbytes) for nbytes in (10, 20, 30)]
    block = spans[1].block
    del spans[1]
    assert table.alive() == spans
    released = table.pop_released()
    assert (released.serial, released.block, released.device_copy, released.ahead_bytes) == (1, block, None, 0)
    assert not table.released
    assert table.alive() == spans
    assert swapped(table, step, 40).serial == 3


def test_a_span_that_an_interrupt_kept_out_of_the_table_changes_no_other(monkeypatch: pytest.MonkeyPatch):
    table, step = SpanTable(), StepRecord()
    spans = [swapped(table, step, 10)]
    with monkeypatch.context() as patched:

        def interrupted(span: SwappedSpan) -> None:
            raise KeyboardInterrupt

        patched.setattr(span_table.weakref, "ref", interrupted)
        with pytest.raises(KeyboardInterrupt):
            swapped(table, step, 20)
    spans.append(swapped(table, step, 30))
    table.pop_released()
    assert table.alive() == spans


def test_bytes_ahead_of_use_are_counted_once_and_given_back_by_the_dead():
    table, step = SpanTable(), StepRecord()
    spans = [swapped(table, step, nbytes) for nbytes in (10, 20)]
    for span in (*spans, *spans):
        table.mark_ahead(span, True)
    assert table.ahead_bytes == 30
    table.mark_ahead(spans[0], False)
    table.mark_ahead(spans[0], False)
    assert table.ahead_bytes == 20
    del span, spans
    while table.released:
        table.pop_released()
    assert table.ahead_bytes == 0


def test_without_a_step_before_the_newest_is_used_first():
    table, step = SpanTable(), StepRecord()
    first, second, third = (swapped(table, step, nbytes) for nbytes in (10, 20, 30))
    assert coming(table, step, third) == [second, first]
    assert coming(table, step, first) == []
    del second
    assert coming(table, step, third) == [None, first]
    table.pop_released()
    assert coming(table, step, third) == [first]


def test_a_step_like_the_one_before_is_used_in_its_order():
    table, step = SpanTable(), StepRecord()
    spans = [swapped(table, step, nbytes) for nbytes in (10, 20, 30)]
    for index in (1, 0, 2):
        spans[index].record.used_at = step.tick()
    table.learn(step)
    step = StepRecord(table.next_serial)
    first, second, third = (swapped(table, step, nbytes) for nbytes in (10, 20, 30))
    assert coming(table, step, second) == [first, third]
    assert coming(table, step, first) == [third]
    # A span of the step before has no place in this step's order.
    assert coming(table, step, spans[2]) == [spans[1], spans[0]]


def test_a_step_that_saves_other_spans_is_used_newest_first():
    table, step = SpanTable(), StepRecord()
    spans = [swapped(table, step, nbytes) for nbytes in (10, 20)]
    for span in spans:
        span.record.used_at = step.tick()
    table.learn(step)
    del span, spans
    while table.released:
        table.pop_released()
    step = StepRecord(table.next_serial)
    first = swapped(table, step, 10)
    assert coming(table, step, first) == []
    second = swapped(table, step, 99)
    assert coming(table, step, second) == [first]
