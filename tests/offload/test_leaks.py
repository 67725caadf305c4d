"""10 steps, and 5 times attach and detach, in every mode: nothing is left behind."""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch.autograd.function import BackwardCFunction

from offload.activations.checkpointing import recompute
from offload.activations.host_pool import IDLE_STEPS
from offload.activations.policy import AutomaticBudget
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import AttachedShards, ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.streams import registry
from offload.streams.registry import Streams
from offload.torch_private import saved_tensor_hooks
from tests.offload.helpers.census import assert_given_back, assert_leaves_nothing
from tests.offload.helpers.dropped import LOCKING, MODES, check_attempts, collect, made_model
from tests.offload.helpers.late import ON_A_GPU
from tests.offload.helpers.models import Stack, stack_inputs, under
from tests.offload.helpers.page_locks import FakeRuntime
from tests.offload.helpers.small import swap_small
from tests.offload.helpers.updates import host_adamw, one_step

STEPS = 10
CYCLES = 5
# By then the pool has returned the blocks that the first steps left idle.
WARM_UP = IDLE_STEPS + 2
# By then every trial of an automatic budget is over as well, also those that page-lock memory.
WARM_UP_OF_TRIALS = AutomaticBudget.TRIALS * (AutomaticBudget.PATIENCE + 1) + WARM_UP
# Two weights of the model a step: a weight has 32 KiB. Tensors are counted one by one as well.
TOLERANCE_BYTES = STEPS * 2 * 2**15

# A mode, and when its updates are made: by `step` (None), beside the next step (False), or from backward on (True).
CASES = {
    "none": (Resident, None),
    "bounce_linear": (lambda: BounceLinear(slots=2, outside="stream"), True),
    "layer_stream": (lambda: LayerStream(slots=2, outside="stream"), False),
    "shard_offload": (lambda: ShardOffload(shards=2), True),
    "tensor_swap": (lambda: TensorSwap(Resident(), budget=4096), None),
    "bounce_linear_swap": (lambda: TensorSwap(BounceLinear(slots=2)), None),
    "layer_stream_swap": (lambda: TensorSwap(LayerStream(slots=2), budget="auto"), True),
    "shard_offload under tensor_swap": (lambda: TensorSwap(ShardOffload(shards=2, checkpoint=False)), False),
    "save_on_cpu": (lambda: SaveOnCpu(Resident()), None),
}
on_cases = pytest.mark.parametrize(("make", "early"), CASES.values(), ids=CASES)
on_devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=ON_A_GPU[:2])])


@pytest.fixture
def locks(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    """Keeps account of page-locked memory on a machine without a GPU, and makes small activations leave the device."""
    swap_small(monkeypatch)
    locks = FakeRuntime()
    if not torch.cuda.is_available():
        locks.install_for_the_cpu(monkeypatch)
    return locks


def steps(model, attached, optimizer, count: int, device: str, early: bool | None) -> None:
    """Runs steps with dropout, of two microbatches where the mode is layer-major."""
    microbatches = 2 if isinstance(attached, AttachedShards) else 1

    def inputs(step: int, microbatch: int) -> torch.Tensor:
        return stack_inputs(step, microbatch, device)

    for step in range(count):
        one_step(model, attached, step, microbatches=microbatches, inputs=inputs, norms=True)
        optimizer.step(scale=1.0 if early else 0.5)
        optimizer.zero_grad()


@pytest.mark.sampled
@on_devices
@on_cases
def test_steps_leave_nothing_behind(make: Callable, early: bool | None, device: str, locks: FakeRuntime):
    model, mode = Stack(width=64, depth=2, dropout=0.1), make()
    with under(mode, model, device) as attached:
        optimizer = host_adamw(model)
        if early is not None:
            attached.overlap(optimizer, early, 2**16)
        tries = getattr(mode, "budget", None) == "auto"
        steps(model, attached, optimizer, WARM_UP_OF_TRIALS if tries else WARM_UP, device, early)
        optimizer.finish()
        locked, host = dict(locks.ranges), attached.counters()

        def more_steps() -> None:
            steps(model, attached, optimizer, STEPS, device, early)
            optimizer.finish()

        assert_leaves_nothing(more_steps, objects=STEPS // 2, resident_bytes=TOLERANCE_BYTES)
        for counter in ("host_pinned_bytes", "host_pageable_bytes"):
            assert getattr(attached.counters(), counter) == getattr(host, counter)
        assert sum(locks.ranges.values()) == sum(locked.values()) == (host.host_pinned_bytes if device == "cpu" else 0)
    assert_given_back(model, device)
    assert locks.ranges == {}


@on_devices
@on_cases
@pytest.mark.slow
def test_attaching_and_detaching_leave_nothing_behind(
    make: Callable, early: bool | None, device: str, locks: FakeRuntime
):
    model = Stack(width=64, depth=2, dropout=0.1)

    def cycle() -> None:
        mode = make()
        with under(mode, model, device) as attached:
            undo = recompute(model.blocks) if not mode.recomputes else lambda: None
            optimizer = host_adamw(model)
            if early is not None:
                attached.overlap(optimizer, early, 2**16)
            steps(model, attached, optimizer, 1, device, early)
            undo()
        assert_given_back(model, device)
        assert locks.ranges == {}

    # Fills the caches of torch, and places the weights where a model lies that was attached before.
    for _ in range(3):
        cycle()

    def cycles() -> None:
        for _ in range(CYCLES):
            cycle()

    assert_leaves_nothing(cycles, objects=CYCLES // 2, resident_bytes=TOLERANCE_BYTES)


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
