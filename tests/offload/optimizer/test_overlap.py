"""Updates beside the step give the numbers of a resident model with the same optimizer, whenever they run."""

import copy
import functools
import threading
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.overlap import Overlap
from offload.streams.stream_checker import CheckedSignal
from offload.weights.gradients import offloader
from tests.offload.helpers.models import Shared, Stack, assert_same, tokens, under, with_copy
from tests.offload.helpers.updates import (
    DTYPES,
    EARLY,
    MODES,
    Mixed,
    eager,
    held_up,
    host_adamw,
    made,
    no_worker_lives,
    one_step,
    sleepy,
    train,
    updating,
)

pytestmark = pytest.mark.usefixtures("small")


@functools.cache
def expected(mode: str, dtype: str, microbatches: int, clip_norm: float | None = None):
    """Trains under `mode` ("none": resident), where the optimizer makes all updates itself."""
    options = {"microbatches": microbatches, "clip_norm": clip_norm}
    return train(made(Mixed, DTYPES[dtype]), MODES.get(mode, Resident)(), overlaps=False, **options)


# Dtype, microbatches, early, clip_norm: every pair of values that can be combined.
SETUPS = [
    ("fp32", 1, False, None),
    ("fp32", 3, True, None),
    ("bf16", 1, True, None),
    ("bf16", 3, False, None),
    ("fp32", 3, False, 0.05),
    ("bf16", 1, False, 0.05),
]


@pytest.mark.parametrize(("dtype", "microbatches", "early", "clip_norm"), SETUPS)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled
def test_equals_resident_step_by_step(mode: str, dtype: str, microbatches: int, early: bool, clip_norm: float | None):
    """Norms and biases without decay, and a learning rate that changes each step."""
    ours = made(Mixed, DTYPES[dtype])
    seen = train(ours, MODES[mode](), early, microbatches=microbatches, clip_norm=clip_norm)
    # Microbatches side by side add gradients of weights that shards share in another order.
    other = mode if mode == "shard_offload" and microbatches > 1 else "none"
    assert_same(seen, expected(other, dtype, microbatches, clip_norm))


def test_clipping_clips():
    runs = [expected("none", "fp32", 3, clip_norm) for clip_norm in (0.05, None)]
    assert any(not torch.equal(one, other) for one, other in zip(*runs, strict=True))


@EARLY
def test_one_layer_used_three_times_and_a_tied_head(early: bool):
    ours, theirs = with_copy(made(Shared))
    assert_same(
        train(ours, BounceLinear(slots=2, outside="stream"), early, inputs=tokens),
        train(theirs, Resident(), inputs=tokens),
    )


@EARLY
@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("kind", ["a block twice", "microbatches side by side"])
@pytest.mark.slow
def test_gradients_that_land_in_pieces(kind: str, microbatches: int, early: bool):
    """Under reentrant checkpoints every use of a weight lands by itself."""
    ours = made(functools.partial(Stack, recompute="reentrant"))
    mode = LayerStream(slots=2)
    if kind == "a block twice":
        ours.blocks.append(ours.blocks[1])
    else:
        mode = ShardOffload(shards=4, checkpoint=False)
    ours, theirs = with_copy(ours)
    options = {"steps": 4, "microbatches": microbatches}
    assert_same(train(ours, mode, early, **options), train(theirs, Resident(), **options))


class Detached(nn.Module):
    """Uses its weight detached first, so that backward needs it after its gradient."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16) / 4)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + F.linear(torch.tanh(F.linear(hidden, self.weight.detach())), self.weight)


@pytest.mark.parametrize("pace", [sleepy, eager])
@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream", "shard_offload"])
@pytest.mark.slow
def test_a_weight_that_backward_needs_after_its_gradient(mode: str, recompute: str | None, pace, monkeypatch):
    pace(monkeypatch)

    def model() -> nn.Module:
        made = Stack(recompute=recompute)
        made.blocks = nn.ModuleList(Detached() for _ in range(4))
        return made

    ours, theirs = with_copy(made(model))
    assert_same(train(ours, MODES[mode](), early=True), train(theirs, Resident(), overlaps=False))


def test_a_step_before_the_last_one_has_ended_is_refused_where_its_updates_have_begun():
    """Their gradients are claimed, so what a second step added would be lost silently."""

    model, mode = made(Stack), LayerStream(slots=2)
    with updating(mode, model, early=True) as (attached, optimizer):
        for step in range(2):
            one_step(model, attached, step)
            optimizer.step()
            optimizer.zero_grad()
        one_step(model, attached, step=2)
        for end in (optimizer.step, optimizer.skip):
            with pytest.raises(RuntimeError, match=r"updates of the last step have begun: .*optimizer.skip\(\)"):
                one_step(model, attached, step=3)
            end()
            optimizer.zero_grad()
            one_step(model, attached, step=4)


def test_a_gradient_after_the_last_is_refused(monkeypatch: pytest.MonkeyPatch):
    """In the second step a block is used twice, under a reentrant checkpoint: its gradient comes in two pieces."""
    model, mode = made(functools.partial(Stack, recompute="reentrant")), LayerStream(slots=2)
    gate = held_up(monkeypatch)
    gate.set()
    with updating(mode, model, early=True) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        optimizer.finish()
        gate.clear()
        optimizer.zero_grad()
        blocks = model.blocks
        model.blocks = nn.ModuleList([*blocks, blocks[3]])
        with pytest.raises(RuntimeError, match=r"blocks.3.\S+ is needed after its gradient.* use_reentrant=False"):
            one_step(model, attached)
        gate.set()
    assert no_worker_lives()


def test_a_hook_on_a_gradient_comes_before_its_update(monkeypatch: pytest.MonkeyPatch):
    eager(monkeypatch)

    def flip(parameter: nn.Parameter) -> None:
        parameter.grad.neg_()

    def run(mode, model: nn.Module) -> list[torch.Tensor]:
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(flip)
        return train(model, mode, early=True, steps=3)

    ours, theirs = with_copy(made(Stack))
    assert_same(run(BounceLinear(slots=2), ours), run(Resident(), theirs))


@pytest.mark.parametrize("mode", ["layer_stream", "shard_offload"])
def test_a_weight_is_updated_while_backward_is_still_in_its_unit(mode: str, monkeypatch: pytest.MonkeyPatch):
    eager(monkeypatch)
    # Each gradient leaves by itself.
    monkeypatch.setattr(offloader, "BATCH_BYTES", 0)
    model, mode, updates_of_down = made(Stack), MODES[mode](), []
    block = model.blocks[1]
    down = block.down.weight

    def watch(module: nn.Module, inputs: tuple, output: torch.Tensor) -> None:
        if output.requires_grad:
            output.register_hook(lambda _: updates_of_down.append(int(optimizer.state[down]["step"])))

    with updating(mode, model, early=True) as (attached, optimizer):
        optimizer.allocate()
        block.up.register_forward_hook(watch)
        for step in range(3):
            one_step(model, attached, step)
            optimizer.step()
            optimizer.zero_grad()
    # The first step learns how gradients land. In a shard the hook runs in the recompute, which alone has gradients.
    assert updates_of_down == [0, 2, 3]


def test_another_overlap_takes_the_place_of_the_first():
    model, mode = made(Stack), LayerStream()
    with under(mode, model) as attached:
        first, second = host_adamw(model), host_adamw(model)
        attached.overlap(first, early=False)
        attached.overlap(second, early=False)
        one_step(model, attached)
        before = model.blocks[0].up.weight.detach().clone()
        # The first makes its updates itself again, at once.
        first.step()
        assert not torch.equal(model.blocks[0].up.weight, before)
        assert attached.counters().updated_parameters == 0
        second.step()
        second.finish()
        assert attached.counters().updated_parameters == sum(p.numel() for p in model.blocks.parameters())


def test_detach_gives_optimizer_and_model_back(monkeypatch: pytest.MonkeyPatch):
    finished, finish = [], Overlap.finish
    monkeypatch.setattr(Overlap, "finish", lambda overlap: finished.append(overlap) or finish(overlap))
    model, mode = made(Stack), LayerStream()
    with updating(mode, model, early=False) as (_, optimizer):
        for read in (model.state_dict, optimizer.state_dict, lambda: model.load_state_dict(model.state_dict())):
            finished.clear()
            read()
            assert finished
    finished.clear()
    model.load_state_dict(model.state_dict())
    optimizer.state_dict()
    assert not finished


def test_copies_wait_for_updates_under_way(monkeypatch: pytest.MonkeyPatch):
    model, mode = made(Stack), LayerStream()
    with updating(mode, model, early=False) as (attached, optimizer):
        optimizer.allocate()
        one_step(model, attached)
        sleepy(monkeypatch, 0.01)
        optimizer.step()
        copy.deepcopy(optimizer)
        assert not [unit.name for unit in attached._overlap._units if attached._overlap.is_pending(unit)]


@EARLY
@pytest.mark.parametrize("device_share", [0, 10_000])
def test_who_follows_reads_the_weights_of_each_step(early: bool, device_share: int, monkeypatch: pytest.MonkeyPatch):
    """Though the next step is under way meanwhile, and updates are slow."""
    sleepy(monkeypatch)
    model, theirs = with_copy(made(Mixed))
    names = {parameter: name for name, parameter in model.named_parameters()}
    seen: dict[str, list[torch.Tensor]] = {name: [] for name in names.values()}
    expected = copy.deepcopy(seen)

    def read(parameters: Iterable[torch.Tensor]) -> None:
        for parameter in parameters:
            seen[names[parameter]].append(parameter.detach().clone())

    def follow(attached: Attached, optimizer: HostAdamW) -> list[torch.Tensor]:
        taken = optimizer.follow(read)
        assert {names[parameter] for parameter in taken} == {
            name for name, parameter in model.named_parameters() if "blocks" in name and parameter.requires_grad
        }
        read(names.keys() - taken)
        return []

    def note(attached: Attached, optimizer: HostAdamW) -> list[torch.Tensor]:
        assert not optimizer.follow(read)
        for name, parameter in theirs.named_parameters():
            expected[name].append(parameter.detach().clone())
        return []

    train(model, LayerStream(), early, device_share=device_share, after_step=follow)
    train(theirs, Resident(), overlaps=False, after_step=note)
    for name, weights in expected.items():
        assert_same(seen[name], weights)


def test_an_interrupt_of_a_wait_hides_no_update_from_later_waits(monkeypatch: pytest.MonkeyPatch):
    gate = held_up(monkeypatch)
    wait = CheckedSignal.wait

    def interrupted(signal: CheckedSignal) -> None:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        wait(signal)

    model, mode = made(Stack), LayerStream()
    with updating(mode, model, early=False) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        with monkeypatch.context() as patch:
            patch.setattr(CheckedSignal, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                optimizer.finish()
        pending = [attached._overlap.is_pending(unit) for unit in attached._overlap._units]
        gate.set()
        assert all(pending)


@EARLY
def test_the_updates_of_an_optimizer_are_made_by_one_mode(early: bool):
    first, second = made(Stack, torch.float32), made(Stack, torch.float32)
    optimizer = host_adamw(nn.ModuleList([first, second]))
    mode, other = LayerStream(), LayerStream()
    with under(mode, first) as attached:
        attached.overlap(optimizer, early)
        # Once more for the same mode.
        attached.overlap(optimizer, early)
        with under(other, second) as refused:
            with pytest.raises(RuntimeError, match="a mode makes the updates of this optimizer already"):
                refused.overlap(optimizer, early)
            one_step(first, attached)
            optimizer.step()
    assert optimizer.state
    with under(other, second) as attached:
        attached.overlap(optimizer, early)
