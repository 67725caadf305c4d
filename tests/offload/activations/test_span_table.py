"""The table of swapped spans: what is alive, what is used next, what dead spans leave behind."""

from __future__ import annotations

import pytest
import torch

from offload.activations import span_table
from offload.activations.host_pool import PooledBlock
from offload.activations.span_table import SpanTable, StepRecord
from offload.activations.swapped_span import ByteRange, SwappedSpan
from offload.memory.host_memory import HostBlock


def swapped(table: SpanTable, step: StepRecord, nbytes: int) -> SwappedSpan:
    """A span of `nbytes` that is saved and swapped now."""
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


def test_without_a_step_before_the_newest_is_used_first():
    table, step = SpanTable(), StepRecord()
    first, second, third = (swapped(table, step, nbytes) for nbytes in (10, 20, 30))
    assert coming(table, step, third) == [second, first]
    assert coming(table, step, first) == []
    del second
    assert coming(table, step, third) == [None, first]
    table.pop_released()
    assert coming(table, step, third) == [first]


def followed(*used_at: int | None) -> tuple[SpanTable, StepRecord]:
    """The table after a step that saved spans of 10 bytes and used them at these times, and the next step."""
    table, step = SpanTable(), StepRecord()
    for time in used_at:
        step.add(10).used_at = time
    table.learn(step)
    return table, StepRecord(table.next_serial)


def test_a_step_like_the_one_before_is_used_in_its_order():
    table, step = followed(12, 11, 13)
    first, second, third = (swapped(table, step, 10) for _ in range(3))
    assert coming(table, step, second) == [first, third]
    assert coming(table, step, first) == [third]
    assert coming(table, step, third) == []
    del third
    assert coming(table, step, first) == [None]
    # A span of the step before has no place in this step's order.
    step = StepRecord(table.next_serial)
    assert coming(table, step, second) == [first]


def test_spans_that_stayed_on_the_device_have_a_place_in_the_order_too():
    table, step = followed(11, 13, 12)
    stayed = step.add(10)
    spans = [swapped(table, step, 10) for _ in range(2)]
    assert list(table.used_after(stayed, step, table.next_serial)) == spans[::-1]


@pytest.mark.parametrize(("used_at", "nbytes"), [((), 10), ((11, 12), 99), ((11, None), 10), ((11,), 10)])
def test_a_step_that_saves_other_spans_than_were_used_before_is_used_newest_first(used_at: tuple, nbytes: int):
    table, step = followed(*used_at)
    first, second = swapped(table, step, 10), swapped(table, step, nbytes)
    assert coming(table, step, second) == [first]
    assert coming(table, step, first) == []


def test_spans_are_numbered_and_timed_in_the_order_of_saving():
    step = StepRecord()
    first, second = step.add(10), step.add(20)
    assert step.use(first)
    assert not step.use(first)
    third = step.add(30)
    assert [(span.index, span.nbytes, span.saved_at) for span in step.spans] == [(0, 10, 1), (1, 20, 2), (2, 30, 4)]
    assert step.spans == [first, second, third]
    assert first.used_at == 3
    assert third in step
    assert StepRecord().add(10) not in step


def test_the_room_of_the_budget_is_what_spans_that_stay_leave_until_they_are_used():
    step = StepRecord(budget=30)
    kept, left = step.add(20), step.add(10)
    step.leave(kept, within_budget=True)
    step.leave(left, within_budget=False)
    assert step.room == 10
    step.use(left)
    assert step.room == 10
    step.use(kept)
    step.use(kept)
    assert step.room == 30
    # A span of another step takes none of this one's room.
    other = StepRecord()
    earlier = other.add(20)
    other.leave(earlier, within_budget=True)
    step.use(earlier)
    assert step.room == 30
    assert other.room == 0
