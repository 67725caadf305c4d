"""The step before shows which gradients are final."""

import gc
from functools import cache, partial

import pytest
import torch
from torch import nn

from offload.knobs import KnobError
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.mode import AttachOptions
from offload.modes.none import Resident
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.optimizer.adamw import HostAdamW
from offload.streams.stream_checker import CheckedStreams
from offload.weights.gradients import offloader
from offload.weights.gradients.final import FinalGradients, NotFinalError
from offload.weights.units.unit import OffloadUnit
from tests.offload.helpers.models import Shared, Stack, assert_same, stack_inputs, tokens, under, with_copy
from tests.offload.helpers.sharers import ThreadSharers, as_sharers
from tests.offload.helpers.units import unit_of_two
from tests.offload.helpers.updates import (
    DTYPES,
    MODES,
    Mixed,
    eager,
    host_adamw,
    made,
    no_worker_lives,
    one_step,
    sleepy,
    train,
    updating,
)
from training.run.loop import gradient_norm


@pytest.fixture
def unit() -> OffloadUnit:
    return unit_of_two()


def step(final: FinalGradients, unit: OffloadUnit, *events: str) -> list[bool]:
    """`+0` lands the gradient of tensor 0, `?0` uses the tensor. Returns whether each landed gradient was final."""
    final.begin_step([unit])
    final.counting = True
    found = []
    for kind, index in events:
        tensor = unit.tensors[int(index)]
        if kind == "+":
            found.append(final.land(unit, tensor))
        else:
            final.use(unit, tensor)
    final.end_step()
    return found


def test_a_gradient_is_final_if_all_of_its_unit_landed_once_in_the_step_before(unit: OffloadUnit):
    final = FinalGradients()
    assert step(final, unit, "?0", "?1", "+1", "+0") == [False, False]
    assert step(final, unit, "?0", "?1", "+1", "+0") == [True, True]
    assert step(final, unit, "+1") == [True]
    assert step(final, unit, "+1", "+0") == [False, False]
    assert step(final, unit, "+1", "+0") == [True, True]


def test_a_unit_whose_weights_are_used_after_their_gradients_is_not_trusted(unit: OffloadUnit):
    final = FinalGradients()
    for _ in range(3):
        assert step(final, unit, "+1", "?1", "+0") == [False, False]
    assert step(final, unit, "+1", "?0", "+0") == [False, False]
    assert step(final, unit, "+1", "?0", "+0") == [True, True]


def test_pieces_of_a_gradient_are_not_final(unit: OffloadUnit):
    final = FinalGradients()
    for _ in range(3):
        assert step(final, unit, "+1", "+0", "+0") == [False] * 3


@pytest.mark.parametrize(("late", "message"), [("+0", "came after the last"), ("?0", "is needed after its gradient")])
def test_late_gradients_and_uses_that_are_new_in_this_step_are_refused(late: str, message: str, unit: OffloadUnit):
    final = FinalGradients()
    step(final, unit, "+1", "+0")
    with pytest.raises(RuntimeError, match=f"first {message}"):
        step(final, unit, "+1", "+0", late)


def test_nothing_is_refused_outside_of_steps_and_nothing_learned_before_it_counts(unit: OffloadUnit):
    final = FinalGradients()
    step(final, unit, "+1", "+0")
    step(final, unit, "+1", "+0")
    final.use(unit, unit.tensors[0])
    final.begin_step([unit])
    assert [final.land(unit, tensor) for tensor in unit.tensors] == [False, False]


@pytest.fixture(autouse=True)
def small_ring(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the ring room for one unit, so that it turns in every step."""
    monkeypatch.setattr(offloader, "RING_UNITS", 1)
    monkeypatch.setattr(offloader, "LEAST_RING_BYTES", 0)


class Uneven(Stack):
    """Weights tied across blocks, a large block, and every third forward skips a block."""

    def __init__(self):
        super().__init__(depth=5, dropout=0.2)
        self.blocks[3].up, self.blocks[3].down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.blocks[4].up.weight = self.blocks[0].up.weight
        self.forwards = 0

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden, skipped = self.stem(inputs), 2 if self.forwards % 3 == 2 else None
        self.forwards += 1
        for index, block in enumerate(self.blocks):
            hidden = hidden if index == skipped else block(hidden)
        return self.head(hidden)


releasing = partial(updating, early=True, releases=True)


@cache
def expected(dtype: str) -> list[torch.Tensor]:
    return train(made(Uneven, DTYPES[dtype]), Resident(), overlaps=False, steps=4)


@pytest.mark.parametrize(("dtype", "pace"), [("bf16", sleepy), ("fp32", eager)])
@pytest.mark.parametrize("mode", MODES)
def test_equals_resident(mode: str, dtype: str, pace, monkeypatch: pytest.MonkeyPatch):
    pace(monkeypatch)
    seen = train(made(Uneven, DTYPES[dtype]), MODES[mode](), early=True, releases=True, steps=4)
    assert_same(seen, expected(dtype))


@pytest.mark.parametrize("checkpoint", [pytest.param(True, marks=pytest.mark.slow), False])
def test_equals_resident_with_microbatches_side_by_side(checkpoint: bool):
    ours, theirs = with_copy(made(partial(Stack, dropout=0.2)))
    options = {"steps": 3, "microbatches": 3}
    seen = train(ours, ShardOffload(shards=2, checkpoint=checkpoint), early=True, releases=True, **options)
    assert_same(seen, train(theirs, Resident(), overlaps=False, **options))


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream"])
def test_equals_resident_with_recompute(mode: str):
    ours, theirs = with_copy(made(partial(Stack, recompute="non-reentrant", dropout=0.2)))
    seen = train(ours, MODES[mode](), early=True, releases=True, steps=3)
    assert_same(seen, train(theirs, Resident(), overlaps=False, steps=3))


def test_equals_resident_where_a_layer_is_used_three_times():
    ours, theirs = with_copy(made(Shared))
    seen = train(ours, BounceLinear(slots=2, outside="stream"), early=True, releases=True, inputs=tokens)
    assert_same(seen, train(theirs, Resident(), overlaps=False, inputs=tokens))


@pytest.mark.parametrize("share", ["some", "all"])
def test_gradients_of_states_on_the_device_do_not_leave_it(share: str):
    block = HostAdamW.planned_bytes(made(Stack, torch.bfloat16).blocks[0].parameters(), placed=True)
    nbytes = 10**9 if share == "all" else 2 * block
    ours, theirs = with_copy(made(Stack, torch.bfloat16))
    copied = []
    seen = train(
        ours,
        LayerStream(slots=2),
        early=True,
        releases=True,
        device_share=nbytes,
        steps=4,
        after_step=lambda attached, _: copied.append(attached.counters().d2h_bytes) or [],
    )
    assert_same(seen, train(theirs, Resident(), overlaps=False, steps=4))
    # The gradients of the others, and the new weights of those.
    assert copied[0] == sum(p.nbytes for p in ours.blocks.parameters())


def test_a_gradient_is_in_no_grad_and_its_norm_is_known():
    kept, released = with_copy(made(Stack))
    modes = LayerStream(slots=2), LayerStream(slots=2)
    norms = []
    for model, mode in zip((kept, released), modes, strict=True):
        with updating(mode, model, early=True, releases=model is released) as (attached, _):
            one_step(model, attached, norms=True)
            norms.append(gradient_norm(model, attached.gradient_norms()))
            assert all((p.grad is None) == (model is released) for p in model.blocks.parameters())
            assert all(p.grad is not None for p in model.head.parameters())
    assert norms[0] == norms[1] > 0


def test_the_first_step_takes_no_more_host_memory_than_the_footprint_says():
    model, mode = made(partial(Stack, depth=8)), LayerStream(slots=2)
    kept = mode.footprint(model)
    plan = mode.footprint(model, options=AttachOptions(release_gradients=True))
    assert plan.host_gradient_bytes == kept.host_gradient_bytes // 8
    with releasing(mode, model) as (attached, optimizer):
        for step in range(3):
            one_step(model, attached, step)
            found = attached.counters().host_pageable_bytes
            assert found == plan.host_weight_bytes + plan.host_gradient_bytes
            optimizer.step()
    assert mode.footprint(model) == kept


def test_waits_for_room_are_counted(monkeypatch: pytest.MonkeyPatch):
    sleepy(monkeypatch, 0.01)
    model, mode = made(partial(Stack, depth=6)), LayerStream(slots=2)
    with releasing(mode, model) as (attached, _):
        one_step(model, attached)
        # The worker is left with what fits into the ring; of the other five blocks the host has waited for most.
        assert attached.counters().update_wait_ms > 50


def test_a_step_that_fails_leaves_nothing_behind():
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    def run(mode, model: nn.Module, releases: bool) -> list[torch.Tensor]:
        with updating(mode, model, early=True, releases=releases) as (attached, optimizer):
            for step in range(4):
                hook = model.blocks[1].register_full_backward_hook(fail) if step == 2 else None
                try:
                    one_step(model, attached, step)
                except ZeroDivisionError:
                    hook.remove()
                    optimizer.skip()
                else:
                    optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
            return [p.detach().clone() for p in model.parameters()]

    ours, theirs = with_copy(made(Stack))
    assert_same(run(LayerStream(slots=2), ours, True), run(LayerStream(slots=2), theirs, False))
    assert no_worker_lives()


def test_an_error_of_the_worker_reaches_a_backward_that_waits_for_room(monkeypatch: pytest.MonkeyPatch):
    def fail(self, claims, scale=1.0):
        raise ArithmeticError("broken update")

    monkeypatch.setattr(HostAdamW, "apply", fail)
    model, mode = made(Stack), LayerStream(slots=2)
    with releasing(mode, model) as (attached, _), pytest.raises(ArithmeticError, match="broken update"):
        one_step(model, attached)
    assert no_worker_lives()


def test_states_move_between_released_and_kept_gradients():
    def run(releases: tuple[bool, bool]) -> list[torch.Tensor]:
        model, states = made(Stack, torch.bfloat16), None
        for begin, released in zip((0, 3), releases, strict=True):
            with updating(LayerStream(slots=2), model, early=True, releases=released) as (attached, optimizer):
                if states is not None:
                    optimizer.load_state_dict(states)
                for step in range(begin, begin + 3):
                    one_step(model, attached, step)
                    optimizer.step()
                    optimizer.zero_grad()
                states = optimizer.state_dict()
        return [p.detach().clone() for p in model.parameters()]

    kept = run((False, False))
    assert_same(run((False, True)), kept)
    assert_same(run((True, False)), kept)


class TestRefusals:
    def refused(self, model: nn.Module, error: type[Exception], match: str, mode=None, **options) -> None:
        mode = mode or LayerStream(slots=2)
        with releasing(mode, model) as (attached, _), pytest.raises(error, match=match):
            one_step(model, attached, **options)

    @pytest.mark.parametrize("kind", ["hook", "post-accumulate hook"])
    def test_hooks_on_gradients(self, kind: str):
        model = made(Stack)
        weight = model.blocks[1].up.weight
        before = weight.detach().clone()
        weight.register_hook(lambda g: g) if kind == "hook" else weight.register_post_accumulate_grad_hook(print)
        self.refused(
            model, RuntimeError, r"blocks\.1\.up\.weight has a hook .*optimizer\.gradients=keep.*remove the hook"
        )
        # Before any update of the step.
        assert torch.equal(weight, before)

    def test_a_gradient_that_is_there_already(self):
        model = made(Stack)
        model.blocks[1].up.weight.grad = torch.ones(32, 16)
        self.refused(model, RuntimeError, r"blocks\.1\.up\.weight has a gradient already.*zero_grad")

    def test_microbatches_one_after_another(self):
        self.refused(
            made(Stack), NotFinalError, "blocks.3.* is not final when it lands.* shard_offload", microbatches=2
        )

    def test_a_backward_outside_of_accumulate(self):
        model, mode = made(Stack), LayerStream()
        with (
            releasing(mode, model) as (attached, _),
            attached.step(),
            pytest.raises(NotFinalError, match=r"attached\.accumulate"),
        ):
            model(stack_inputs(0, 0)).sum().backward()

    def test_gradients_in_pieces(self):
        model = made(partial(Stack, recompute="reentrant"))
        model.blocks.append(model.blocks[3])
        self.refused(model, NotFinalError, "use_reentrant=False; or keep gradients")

    def test_sparse_gradients(self):
        model = made(lambda: nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4)))
        mode = BounceLinear(outside="stream")
        with (
            releasing(mode, model) as (attached, _),
            attached.step(),
            pytest.raises(RuntimeError, match="weight is sparse"),
        ):
            attached.accumulate([lambda: model(torch.arange(3)).sum()])

    def test_a_loss_on_the_host(self):
        model, mode = made(Stack), LayerStream()
        with (
            releasing(mode, model) as (attached, _),
            attached.step(),
            pytest.raises(NotFinalError, match="in host memory"),
        ):
            attached.accumulate(
                [lambda: model(stack_inputs(0, 0)).sum() + model.get_parameter("blocks.0.up.weight").square().sum()]
            )

    @pytest.mark.parametrize("mode", [LayerStream, lambda: TensorSwap(LayerStream())])
    def test_units_in_which_not_all_trains(self, mode):
        for kind, name in (("a buffer", "blocks.2.norm"), ("frozen", "blocks.1.norm")):
            model, chosen = made(Mixed), mode()
            if kind == "a buffer":
                model.blocks[1].norm.requires_grad_(True)
            else:
                model.blocks[2].norm = nn.LayerNorm(16)
            assert name in (reason := chosen.footprint(model).why_gradients_stay)
            assert kind in reason
            with pytest.raises(KnobError, match=r"gradients=release: .* take keep"), releasing(chosen, model):
                pass

    def test_no_updates_inside_backward(self):
        model, options = made(Stack), AttachOptions(release_gradients=True)
        with under(LayerStream(), model, options=options) as attached:
            with pytest.raises(RuntimeError, match=r"attached\.overlap\(optimizer, early=True\)"):
                one_step(model, attached)
            with pytest.raises(KnobError, match="early=False: must be true"):
                attached.overlap(host_adamw(model), early=False)

    def test_modes_without_gradients_on_the_host(self):
        for mode in (Resident(), TensorSwap(Resident())):
            assert "no weights stream" in mode.footprint(made(Stack)).why_gradients_stay
        frozen = made(Stack)
        frozen.blocks.requires_grad_(False)
        assert "nothing that streams trains" in LayerStream().footprint(frozen).why_gradients_stay

    def test_sharers_of_experts(self):
        def work(sharers: ThreadSharers) -> None:
            options = AttachOptions(sharers=sharers, release_gradients=True)
            model = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(8, 8) for _ in range(2))})
            with pytest.raises(KnobError, match="processes that share"):
                LayerStream().attach(model, CheckedStreams(torch.device("cpu")), options)

        as_sharers(2, work)


def test_nothing_keeps_the_ring_alive():
    model, mode = made(Stack), LayerStream()
    with releasing(mode, model) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        arena = attached._streamer.arena
        assert arena.pageable_bytes
    gc.collect()
    assert not arena.pageable_bytes
