"""The tracker counts live bytes of meta tensors, their peak, and the FLOPs of operations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.modes.layer_stream import LayerStream
from offload.planning import memory_tracker
from offload.planning.dry_run import DryRun, dry_run
from offload.planning.memory_tracker import MemoryTracker
from offload.torch_private.torch_internals import storage_address
from tests.offload.helpers.models import Stack

MIB = 2**20


def meta(*shape: int, **options) -> torch.Tensor:
    return torch.empty(*shape, device="meta", **options)


def test_what_is_alive_and_was_at_most():
    tracker = MemoryTracker()
    with tracker.recording():
        first = meta(MIB, dtype=torch.uint8)
        second = first + 1
        view = second[::2]
        assert (tracker.live_bytes, tracker.peak_bytes) == (2 * MIB, 2 * MIB)
        del second
        assert tracker.live_bytes == 2 * MIB, "a view keeps the memory"
        del view, first
        assert (tracker.live_bytes, tracker.peak_bytes) == (0, 2 * MIB)
        tracker.start_step()
        meta(1)
    assert tracker.peak_bytes == 512, "in pieces as the allocator hands them out"


def test_masks_and_scores_of_all_pairs_of_many_tokens_are_told_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(memory_tracker, "LONG", 64)
    tracker = MemoryTracker()
    with tracker.recording():
        others = [meta(2, 64, 64), meta(64, 64), meta(1, 2, 63, 63), meta(1, 2, 64, 62), meta(1, 2, 32, 64)]
        assert tracker.square_bytes == 0
        mask = meta(1, 1, 64, 64, dtype=torch.bool)
        view = mask.expand(2, 3, 64, 64)
        with_sink = meta(1, 2, 64, 65)
        assert tracker.square_bytes == mask.nbytes + -(-with_sink.nbytes // 512) * 512
        del with_sink, others
        tracker.start_step()
        assert tracker.square_bytes == mask.nbytes
        del mask, view
        assert tracker.square_bytes == 64 * 64, "at most in the step"
        tracker.start_step()
    assert tracker.square_bytes == 0


def test_what_was_there_before_is_not_counted():
    weight, tracker = meta(1024, 1024, requires_grad=True), MemoryTracker()
    with tracker.recording(), tracker.recording():
        (weight.t() * 1).detach_().add_(1)
        assert tracker.peak_bytes == weight.nbytes
        weight.add(0)
    assert tracker.live_bytes == 0


def test_products_are_counted_forward_and_backward():
    tracker = MemoryTracker()
    layer = torch.nn.Linear(32, 64, device="meta")
    with tracker.recording():
        layer(meta(10, 32, requires_grad=True)).sum().backward()
    assert tracker.flops == 3 * 2 * 10 * 32 * 64


def test_gradients_that_stay_are_part_of_the_peak_once():
    tracker, layer = MemoryTracker(), torch.nn.Linear(64, 64, bias=False, device="meta")
    layer.weight.register_post_accumulate_grad_hook(tracker.gradient_landed)
    with tracker.recording():
        for _ in range(2):
            layer(meta(8, 64)).sum().backward()
        assert tracker.gradient_bytes == layer.weight.nbytes
        peak = meta(MIB)
        assert tracker.peak_gradient_bytes == layer.weight.nbytes
        del peak
        tracker.start_step()
        assert (tracker.gradient_bytes, tracker.peak_bytes) == (0, tracker.live_bytes)


def test_copies_are_reported_with_their_bytes():
    spent = []
    tracker = MemoryTracker(lambda flops, copied, moved, kind=None: spent.append((flops, copied, moved)))
    with tracker.recording():
        meta(4, 4).copy_(meta(4, 4))
    tracker.add_flops(3.0)
    assert spent == [(0.0, 64, 0), (3.0, 0, 0)]


def test_operations_other_than_products_read_and_write_memory():
    spent = []
    tracker = MemoryTracker(lambda flops, copied, moved, kind=None: spent.append(moved))
    packed, scale = meta(100, 10, dtype=torch.int8), meta(100, 1)
    rows, table, tokens = meta(4, 10, dtype=torch.bfloat16), meta(1000, 10), meta(3, dtype=torch.int64)
    with tracker.recording():
        # From few bits to a weight.
        weight = (packed * scale).to(torch.bfloat16)
        # Products take their time by their FLOPs; views and new memory take none.
        product = rows @ weight.t()
        torch.empty_like(packed)
        meta(100, 10).fill_(1)
        product.add_(1)
        torch.linalg.vector_norm(weight, dim=1)
        # The rows alone, and not the table.
        torch.nn.functional.embedding(tokens, table)
    made = [1000 + 400 + 4000, 4000 + 2000]
    assert [each for each in spent if each] == [*made, 2 * 800, 2000 + 200, 3 * 8 + 2 * 120]
    assert tracker.memory_bytes == sum(spent)


def test_two_numbers_in_a_byte_are_read_once():
    tracker = MemoryTracker()
    packed = meta(500, 1, dtype=torch.uint8)
    with tracker.recording():
        packed.expand(-1, 2).to(torch.bfloat16, memory_format=torch.contiguous_format).view(-1)
    assert tracker.memory_bytes == 500 + 2000


OPERATIONS: dict[str, Callable[[Tensor], object]] = {
    "a product": lambda x: x @ x.t(),
    "to another dtype": lambda x: x.to(torch.bfloat16),
    "a strided result": lambda x: torch.empty_like(x.t()),
    "several results": lambda x: torch.var_mean(x, dim=0),
    "a list of results": lambda x: torch.ops.aten.unsafe_split(x, 2),
    "written to": lambda x: x.add_(1),
    "written to the memory of another": lambda x: torch.mul(x, 2, out=torch.empty_like(x)),
    "a view": lambda x: x[1:],
    "a view that its schema does not name": lambda x: torch.ops.aten._unsafe_view(x, [16]),
    "another size": lambda x: x.resize_(2, 2),
    "True for 1": lambda x: torch.full((), True, device="meta"),
    "1 for True": lambda x: torch.full((), 1, device="meta"),
    "without a dimension": lambda x: x.sum(),
}


def made_by(operation: Callable[[Tensor], object]) -> list[object]:
    """Returns what can be seen of a result: also whether it is the argument, or lies in its memory."""
    x = torch.empty(4, 4, device="meta")
    before = x._version
    with MemoryTracker().recording():
        result = operation(x)
    seen: list[object] = [type(result), x.shape, x._version - before]
    for each in result if isinstance(result, (tuple, list)) else [result]:
        storage = each.untyped_storage()
        shared = storage_address(storage) == storage_address(x.untyped_storage())
        seen += [each.shape, each.stride(), each.dtype, each is x, shared, storage.nbytes()]
    return seen


@pytest.fixture
def none_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_tracker, "_KNOWN", {})


@pytest.mark.usefixtures("none_known")
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_known_result_is_that_of_torch(name: str):
    expected = made_by(OPERATIONS[name])
    for other in OPERATIONS.values():
        made_by(other)
    assert made_by(OPERATIONS[name]) == expected


@pytest.mark.usefixtures("none_known")
def test_blocks_that_are_alike_are_computed_once(monkeypatch: pytest.MonkeyPatch):
    model = Stack(16, 8).to("meta")
    x = torch.empty(2, 8, device="meta")

    def planned() -> DryRun:
        return dry_run(LayerStream(slots=2), model, [lambda: model(x).square().mean()])

    found, entries = planned(), len(memory_tracker._KNOWN)
    assert found == planned()
    more = Stack(16, 16).to("meta")
    dry_run(LayerStream(slots=2), more, [lambda: more(x).square().mean()])
    assert len(memory_tracker._KNOWN) == entries
    monkeypatch.setattr(memory_tracker, "_key", lambda *operation: None)
    assert found == planned()


@pytest.mark.usefixtures("none_known")
def test_errors_are_those_of_torch():
    x = torch.empty(2, 5, device="meta")
    for _ in range(2):
        with MemoryTracker().recording(), pytest.raises(RuntimeError, match="reduction dim"):
            x @ x
