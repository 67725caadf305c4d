"""A mode that is dropped without detach leaves nothing behind: memory that is locked, streams, a watch on autograd."""

import itertools

import pytest
from torch.autograd.function import BackwardCFunction

from offload.streams import registry
from offload.streams.registry import Streams
from offload.torch_private import saved_tensor_hooks
from tests.offload.helpers.dropped import LOCKING, MODES, check_attempts, collect, made_model
from tests.offload.helpers.models import stack_inputs
from tests.offload.helpers.page_locks import FakeRuntime
from tests.offload.helpers.small import swap_small


@pytest.mark.parametrize(("name", "where"), list(zip(MODES, itertools.cycle(["forward", "backward"]), strict=False)))
@pytest.mark.slow
def test_a_dropped_mode_unlocks_its_memory_first(
    name: str, where: str, streams: Streams, monkeypatch: pytest.MonkeyPatch
):
    swap_small(monkeypatch)
    runtime = FakeRuntime()
    runtime.install_for_the_cpu(monkeypatch)
    for locked in check_attempts(name, where, streams, attempts=1):
        assert sum(runtime.ranges.values()) == locked
        assert runtime.unmapped == []
    assert ("register" in runtime.calls) == (name in LOCKING)


@pytest.mark.parametrize("name", ["layer_stream", "shard_offload", "tensor_swap over bounce_linear"])
def test_a_dropped_mode_holds_no_streams_and_watches_nothing(
    name: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
):
    collect()
    # What modes of other tests, kept by somebody, have left on.
    before = vars(BackwardCFunction).get("__init__")
    request.addfinalizer(lambda: before is not None and setattr(BackwardCFunction, "__init__", before))
    monkeypatch.setattr(saved_tensor_hooks, "_watches", set())
    monkeypatch.setattr(registry, "_open", {})

    def use() -> None:
        model, mode = made_model(), MODES[name]()
        attached = mode.attach(model, registry.acquire("cpu"))
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        assert "__init__" in vars(BackwardCFunction)

    use()
    collect()
    assert "__init__" not in vars(BackwardCFunction)
    assert registry.holders("cpu") == 0
