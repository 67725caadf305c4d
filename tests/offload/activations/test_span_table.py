"""Saved bytes are found again while their storages live and nobody writes; what dead spans leave behind."""

import pytest
import torch
from torch import nn

from offload.activations import span_table
from offload.activations.host_pool import PooledBlock
from offload.activations.policy import SpanRecord
from offload.activations.span_table import (
    ExcludedStorages,
    SavedSpan,
    SavedStorages,
    SpanTable,
    StepRecord,
    share_version,
    version_handle,
)
from offload.activations.swapped_span import ByteRange, SwappedSpan
from offload.memory.host_memory import HostBlock
from offload.modes import tensor_swap
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.torch_private.torch_internals import StorageWeakRef
from tests.offload.helpers.models import same_as_resident
from tests.offload.helpers.swapping import Swap, save


class Recurrent(nn.Module):
    """A cell over five steps of time. On the CPU its gates are chunks of one storage, each with its own counter."""

    def __init__(self, cell: type[nn.Module]):
        super().__init__()
        self.cell = cell(8, 12)
        self.head = nn.Linear(12, 3)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        state = None
        for _ in range(5):
            state = self.cell(inputs, state)
            inputs = inputs.roll(1, dims=1)
        return self.head(state[0] if isinstance(state, tuple) else state)


class UnsafeGates(nn.Module):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(8, 32)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        reset, update, cell, out = self.gates(inputs).unsafe_chunk(4, dim=1)
        return reset.sigmoid_() * update.sigmoid_() + cell.tanh_() * out.sigmoid_()


@pytest.mark.parametrize("in_flight", [0, 1 << 29])
@pytest.mark.parametrize(
    "model", [lambda: Recurrent(nn.LSTMCell), lambda: Recurrent(nn.GRUCell), lambda: Recurrent(nn.RNNCell), UnsafeGates]
)
def test_gates_that_are_written_one_by_one(model, in_flight: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", in_flight)
    torch.manual_seed(0)
    same_as_resident(model(), TensorSwap(Resident()))


def test_equal_versions_of_two_counters_are_not_one_state(swap: Swap):
    whole = torch.zeros(4, 12)
    first, second = whole.unsafe_chunk(2, dim=1)
    scalar, seen = save(swap, first.add_(1))
    second.add_(2)
    later, seen_later = save(swap, second)
    del whole, first, second
    (scalar + later).backward()
    assert torch.equal(seen[0][0], torch.ones(4, 6))
    assert torch.equal(seen_later[0][0], torch.full((4, 6), 2.0))


def test_a_storage_is_excluded_until_the_last_removal():
    excluded, tensor = ExcludedStorages(), torch.zeros(8)
    view = tensor[2:]
    with excluded.during([tensor]):
        with excluded.during([view, view]):
            assert tensor.untyped_storage() in excluded
        assert view.untyped_storage() in excluded
        assert torch.zeros(8).untyped_storage() not in excluded
    assert tensor.untyped_storage() not in excluded


def test_a_storage_that_was_added_stays_excluded_after_a_block():
    excluded, tensor = ExcludedStorages(), torch.zeros(8)
    excluded.add(tensor)
    with pytest.raises(KeyError), excluded.during([tensor]):
        raise KeyError
    assert tensor.untyped_storage() in excluded


def test_a_dead_storage_leaves_its_address_to_no_other():
    excluded = ExcludedStorages()
    excluded.add(torch.zeros(8))
    assert not any(torch.zeros(8).untyped_storage() in excluded for _ in range(100))


def test_tensors_without_a_storage_are_ignored():
    excluded, sparse = ExcludedStorages(), torch.eye(3).to_sparse()
    excluded.add(sparse)
    with excluded.during([sparse]):
        pass


class Saved:
    """A table with one span of a tensor that stayed on the device: the bytes 0 to 64."""

    def __init__(self, tensor: torch.Tensor):
        self.storages, self.record = SavedStorages(), SpanRecord(0, 64, saved_at=1)
        handle = version_handle(tensor)
        span = SavedSpan(ByteRange(0, 64), handle, handle._version, self.record, None)
        self.storages.add(tensor.untyped_storage(), span)

    def find(self, tensor: torch.Tensor, start: int = 0, stop: int = 64):
        return self.storages.find(tensor.untyped_storage(), ByteRange(start, stop), tensor)


def test_bytes_that_were_saved_are_found_for_every_view_within_them():
    tensor = torch.zeros(32)
    saved = Saved(tensor)
    assert saved.find(tensor) == saved.find(tensor[:4], 0, 16) == (saved.record, None)
    assert saved.find(tensor, 0, 128) is None
    assert saved.find(torch.zeros(32)) is None


def test_bytes_that_were_written_since_are_not_found():
    tensor = torch.zeros(32)
    saved = Saved(tensor)
    tensor[20:].add_(1)
    assert saved.find(tensor) is None


def test_bytes_under_another_counter_are_not_found():
    tensor = torch.zeros(32)
    saved = Saved(tensor)
    assert saved.find(tensor.data) is None


def test_tensors_that_share_a_counter():
    tensor = torch.zeros(4, 4)
    first, second = tensor.unsafe_chunk(2)
    for other, shared in [(tensor[0], True), (tensor.detach(), True), (tensor.data, False), (first, False)]:
        before = (tensor._version, other._version)
        assert share_version(tensor, other) is shared
        assert (tensor._version, other._version) == before
    assert not share_version(first, second)


def test_a_handle_has_the_counter_of_its_tensor_and_not_the_memory():
    tensor, other = torch.zeros(8, dtype=torch.bfloat16), torch.zeros(8, dtype=torch.bfloat16)
    handle, storage = version_handle(tensor), StorageWeakRef(tensor.untyped_storage())
    assert (handle.numel(), handle.dtype) == (0, torch.bfloat16)
    before = handle._version
    tensor.add_(1)
    tensor[2:].mul_(2)
    assert handle._version == tensor._version == before + 2
    assert share_version(handle, tensor)
    assert not share_version(handle, version_handle(other))
    del tensor
    assert storage.expired()


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
