"""Known results are those that torch computes: shapes, strides, memory that is shared, and what is written to."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from offload.modes.layer_stream import LayerStream
from offload.planning import known_results
from offload.planning.dry_run import DryRun, dry_run
from offload.planning.memory_tracker import MemoryTracker
from offload.torch_private.torch_internals import storage_address
from tests.offload.helpers.models import Stack

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
    monkeypatch.setattr(known_results, "_KNOWN", {})


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

    found, entries = planned(), len(known_results._KNOWN)
    assert found == planned()
    more = Stack(16, 16).to("meta")
    dry_run(LayerStream(slots=2), more, [lambda: more(x).square().mean()])
    assert len(known_results._KNOWN) == entries
    monkeypatch.setattr(known_results, "_key", lambda *operation: None)
    assert found == planned()


@pytest.mark.usefixtures("none_known")
def test_errors_are_those_of_torch():
    x = torch.empty(2, 5, device="meta")
    for _ in range(2):
        with MemoryTracker().recording(), pytest.raises(RuntimeError, match="reduction dim"):
            x @ x
