"""Updates beside a real device give the numbers of updates in turn, while each stream or the worker is late."""

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.worker import UpdateWorker
from offload.speculation.trials import Speculation
from offload.weights.gradients import offloader
from offload.weights.gradients.offloader import GradientRing
from tests.offload.helpers import updates
from tests.offload.helpers.kernels import needs_compiler
from tests.offload.helpers.late import ON_A_GPU, gpu_inputs, make_late
from tests.offload.helpers.models import Stack, assert_same, under, with_copy
from tests.offload.helpers.optimizers import SETTINGS

pytestmark = [*ON_A_GPU, pytest.mark.usefixtures("small_activations")]

MODES = {
    "bounce_linear": lambda: BounceLinear(slots=2, outside="stream"),
    "layer_stream": lambda: LayerStream(slots=2, outside="stream"),
    "shard_offload": lambda: ShardOffload(shards=2),
    "tensor_swap over layer_stream": lambda: TensorSwap(LayerStream(slots=2)),
}


@pytest.fixture(params=["as it is", "slow"])
def worker(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes updates as fast as they are, or so slow that they take longer than a step of the device."""
    if request.param == "slow":
        updates.sleepy(monkeypatch)


def train(model: nn.Module, mode, early: bool | None, *, microbatches: int = 2, **options) -> list[torch.Tensor]:
    """Returns losses, some evaluations, states and weights. `early` None: the optimizer makes all updates itself."""
    dtype, steps = model.head.weight.dtype, 0

    def evaluated(*_: object) -> list[torch.Tensor]:
        nonlocal steps
        steps += 1
        with torch.no_grad():
            return [model(gpu_inputs(steps, 9).to(dtype)).clone()] if steps % 3 == 0 else []

    options |= {"microbatches": microbatches, "speculate": "on", "overlaps": early is not None}
    options |= {"steps": 6, "inputs": gpu_inputs, "device": "cuda", "after_step": evaluated}
    return [tensor.cpu() for tensor in updates.train(model, mode, bool(early), **options)]


@pytest.mark.usefixtures("delayed", "poisoned", "worker")
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_equals_updates_in_turn(mode: str, early: bool):
    ours, theirs = with_copy(Stack(width=64, dropout=0.2))
    assert_same(train(ours, MODES[mode](), early), train(theirs, MODES[mode](), None))


@pytest.fixture
def small_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    """Released gradients have room for those of one unit."""
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)
    monkeypatch.setattr(offloader, "RING_UNITS", 1)


@pytest.mark.usefixtures("delayed", "poisoned", "worker", "small_ring")
@pytest.mark.parametrize("share", [0, 300_000])
@pytest.mark.parametrize("mode", MODES)
def test_released_gradients_equal_updates_in_turn(mode: str, share: int):
    """The float32 states of some blocks are on the device."""
    ours, theirs = with_copy(Stack(width=64, dropout=0.2))
    options = {"microbatches": 3 if mode == "shard_offload" else 1}
    seen = train(ours, MODES[mode](), True, releases=True, device_share=share, **options)
    assert_same(seen, train(theirs, MODES[mode](), True, device_share=share, **options))


@pytest.mark.usefixtures("small_ring")
def test_released_gradients_are_page_locked_in_the_ring_alone():
    model, mode = Stack(width=256, depth=8).bfloat16(), LayerStream(slots=2)
    options = AttachOptions(release_gradients=True)
    plan = mode.footprint(model, options=options)
    with under(mode, model, "cuda", options) as attached:
        attached.overlap(HostAdamW(model.parameters()), early=True)
        with attached.step(norms=True):
            attached.accumulate([lambda: model(gpu_inputs(0, 0).bfloat16()).float().square().mean()])
        counters = attached.counters()
        assert counters.host_pageable_bytes == 0
        assert counters.host_pinned_bytes == plan.host_weight_bytes + plan.host_gradient_bytes
        assert plan.host_gradient_bytes == plan.d2h_bytes // 8
        assert all(p.grad is None for p in model.blocks.parameters())


@pytest.mark.usefixtures("small_ring")
def test_a_wait_for_the_ring_that_is_missing_would_show(monkeypatch: pytest.MonkeyPatch):
    updates.sleepy(monkeypatch)
    ours, theirs = with_copy(Stack(width=64))
    expected = train(theirs, LayerStream(slots=2), True, microbatches=1, releases=True)
    monkeypatch.setattr(GradientRing, "_take_back", lambda self: self._lent.clear())
    broken = train(ours, LayerStream(slots=2), True, microbatches=1, releases=True)
    assert any(not torch.equal(one, other) for one, other in zip(broken, expected, strict=True))


@pytest.mark.usefixtures("delayed", "poisoned", "worker")
@pytest.mark.parametrize("microbatches", [1, 3])
def test_equals_updates_in_turn_in_bf16_with_clipping(microbatches: int):
    ours, theirs = with_copy(Stack(width=64).bfloat16())
    options = {"microbatches": microbatches, "clip_norm": 0.01}
    expected = train(theirs, LayerStream(slots=2), None, **options)
    assert_same(train(ours, LayerStream(slots=2), False, **options), expected)


@pytest.mark.usefixtures("delayed", "poisoned", "worker")
@pytest.mark.parametrize("mode", MODES)
def test_equals_updates_in_turn_where_some_steps_are_undone(mode: str):
    """A limit that clips some of the steps, by updates that begin before the norm is known."""
    ours, theirs = with_copy(Stack(width=64).bfloat16())
    options = {"microbatches": 1, "clip_norm": 0.1}
    seen = train(ours, MODES[mode](), False, **options, speculation=Speculation(0.1, 1 << 26))
    assert_same(seen, train(theirs, MODES[mode](), None, **options))


@needs_compiler
@pytest.mark.parametrize("early", [False, True])
def test_equals_updates_in_turn_with_the_compiled_kernel(early: bool):
    ours, theirs = with_copy(Stack(width=256, depth=8).bfloat16())
    options = {"microbatches": 1}
    assert_same(train(ours, LayerStream(), early, **options), train(theirs, LayerStream(), None, **options))


@needs_compiler
@pytest.mark.parametrize("share", [0, 3_000_000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_updates_of_host_and_device_equal_those_of_the_resident_model(share: int, dtype: torch.dtype):
    """The compiled kernels of both have the same bits; with a share, the states of some blocks are on the device."""
    pytest.importorskip("triton", reason="needs Triton")
    ours, theirs = with_copy(Stack(width=256, depth=8).to(dtype))
    options = {"microbatches": 1}
    seen = train(ours, LayerStream(), True, device_share=share, **options)
    assert_same(seen, train(theirs, Resident(), None, **options))


@pytest.mark.parametrize("mode", MODES)
def test_norms_taken_on_the_device_are_those_of_the_gradients_at_home(mode: str):
    model, mode = Stack(width=64), MODES[mode]()
    with under(mode, model, "cuda") as attached:
        for microbatches in (1, 3):
            with attached.step(norms=True):
                losses = [lambda index=index: model(gpu_inputs(0, index)).sum() for index in range(3)]
                attached.accumulate(losses[:microbatches])
            norms = attached.gradient_norms()
            assert set(norms) >= set(model.blocks[0].parameters())
            for parameter, norm in norms.items():
                assert norm.is_cuda
                assert norm.item() == pytest.approx(parameter.grad.double().norm().item(), rel=1e-6)
            model.zero_grad()


def test_the_host_goes_on_while_the_worker_updates(monkeypatch: pytest.MonkeyPatch):
    gate = updates.held_up(monkeypatch)
    model, mode = Stack(width=64, depth=8), LayerStream(slots=2)
    with under(mode, model, "cuda") as attached:
        optimizer = HostAdamW(model.parameters())
        attached.overlap(optimizer, early=False)
        with attached.step():
            model(gpu_inputs(0, 0)).sum().backward()
        optimizer.step()
        per_block = sum(p.numel() for p in model.blocks[0].parameters())
        assert attached.counters().updated_parameters < 8 * per_block
        gate.set()
        optimizer.finish()
        assert attached.counters().updated_parameters == 8 * per_block


def test_a_wait_for_the_worker_that_is_missing_would_show(monkeypatch: pytest.MonkeyPatch):
    """The tests above can fail: without the wait they do."""
    updates.sleepy(monkeypatch)

    def evaluated_after_a_step(model: nn.Module, mode) -> torch.Tensor:
        with under(mode, model, "cuda") as attached, torch.no_grad():
            optimizer = HostAdamW(model.parameters(), **SETTINGS)
            attached.overlap(optimizer, early=False)
            with attached.step(), torch.enable_grad():
                model(gpu_inputs(0, 0)).sum().backward()
            optimizer.step()
            return model(gpu_inputs(0, 0))

    ours, theirs = with_copy(Stack(width=64))
    expected = evaluated_after_a_step(theirs, LayerStream(slots=2))
    monkeypatch.setattr(UpdateWorker, "wait", lambda self, unit: None)
    assert not torch.equal(evaluated_after_a_step(ours, LayerStream(slots=2)), expected)


def test_a_wait_for_gradients_that_is_missing_would_show(monkeypatch: pytest.MonkeyPatch):
    make_late(monkeypatch, "d2h")
    offer = UpdateWorker.offer

    def offered_as_landed(self, update):
        update.landed = ()
        return offer(self, update)

    ours, theirs = with_copy(Stack(width=64))
    expected = train(theirs, LayerStream(slots=2), early=True)
    monkeypatch.setattr(UpdateWorker, "offer", offered_as_landed)
    broken = train(ours, LayerStream(slots=2), early=True)
    assert any(not torch.equal(one, other) for one, other in zip(broken, expected, strict=True))
