"""tensor_swap, alone and over modes that stream weights, computes the resident model's numbers."""

from __future__ import annotations

import copy
import gc
import pickle

import pytest
import torch
import torch.nn.functional as F
from support import Block, Shared, Stack, assert_same, attached, stack_inputs, tokens, train, twin
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations import ActivationOffloader
from offload.modes import tensor_swap
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.recompute import recompute

WEIGHTS = {
    "resident": Resident,
    "layer_stream": lambda: LayerStream(slots=2),
    "bounce_linear": lambda: BounceLinear(slots=1),
    "shard_offload": lambda: ShardOffload(shards=2, checkpoint=False),
    "shard_offload recomputing": lambda: ShardOffload(shards=2, slots=1),
}


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little that most of what is saved really leaves these small models' device."""
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 0)


def swapping(weights=None, **knobs) -> TensorSwap:
    return TensorSwap(weights or Resident(), **({"min_bytes": 1, "prefetch": 2000} | knobs))


def same_as_resident(model: nn.Module, mode, inputs=stack_inputs, **options) -> None:
    swapped, resident = twin(model)
    assert_same(train(swapped, mode, inputs, **options), train(resident, Resident(), inputs, **options))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("checkpointing", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize(
    "layers", [None, ["blocks.*"], ["*.up", "*.norm"], ["*"]], ids=["model", "blocks", "parts", "all"]
)
def test_equals_resident(weights: str, checkpointing: str | None, layers: list | None):
    mode = swapping(WEIGHTS[weights](), layers=layers)
    same_as_resident(Stack(recompute=checkpointing, dropout=0.3), mode)


@pytest.mark.parametrize("weights", [name for name in WEIGHTS if "recomputing" not in name])
@pytest.mark.parametrize("layers", [None, ["blocks.*"]])
def test_equals_resident_with_blocks_that_are_recomputed_after_attaching(weights: str, layers: list | None):
    """As in the training loop: the block's forward is replaced, so only what enters it is saved outside."""

    class Recomputed(TensorSwap):
        def attach(self, model, streams):
            super().attach(model, streams)
            self.undo = recompute(model.blocks)

        def detach(self):
            self.undo()
            super().detach()

    options = {"min_bytes": 1, "prefetch": 2000, "layers": layers}
    swapped, resident = twin(Stack(dropout=0.3))
    mode = Recomputed(WEIGHTS[weights](), **options)
    with attached(mode, swapped):
        with mode.step():
            swapped(stack_inputs(0, 0)).sum().backward()
        outside = 0 if layers else 5 * 16 * 4
        assert mode.counters()["swapped_bytes"] == 4 * (5 * 16 * 4) + outside
        swapped.zero_grad()
    assert_same(
        train(swapped, Recomputed(WEIGHTS[weights](), **options)),
        train(resident, Resident()),
    )


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize(
    "knobs", [{"budget": 3000}, {"keep_last": 2}, {"host_budget": 20000}, {"prefetch": 0}], ids=str
)
def test_knobs_change_no_number(weights: str, knobs: dict):
    same_as_resident(Stack(dropout=0.2), swapping(WEIGHTS[weights](), **knobs))


def test_automatic_budget_changes_no_number():
    same_as_resident(Stack(), swapping(budget="auto"), steps=5)


def test_shared_layers_and_tied_weights():
    same_as_resident(Shared(), swapping(BounceLinear(slots=2)), tokens)


def test_frozen_first_layers_and_layers_that_save_nothing():
    class Quiet(nn.Module):
        def forward(self, hidden):
            return hidden + 1

    model = Stack()
    model.blocks.insert(1, Quiet())
    for frozen in (model.stem, model.blocks[0]):
        frozen.requires_grad_(False)
    for layers in (None, ["blocks.*"]):
        same_as_resident(copy.deepcopy(model), swapping(layers=layers))


class Towers(nn.Module):
    """Two lists of blocks of different depth, and a context that every block shares."""

    def __init__(self):
        super().__init__()
        self.left = nn.ModuleList(Block(8) for _ in range(4))
        self.right = nn.ModuleList(Block(8) for _ in range(2))

    def forward(self, hidden):
        rope = torch.linspace(0, 1, 8).expand(5, 8)
        left = right = hidden
        for block in self.left:
            left = block(left * rope) + hidden
        for block in self.right:
            right = block(right * rope)
        return left * right


@pytest.mark.parametrize("layers", [None, ["left.*", "right.*"], ["left.*"]])
def test_two_towers_with_a_shared_context(layers: list | None):
    same_as_resident(Towers(), swapping(layers=layers))


def test_a_deeper_model_later_in_the_same_process():
    same_as_resident(Stack(depth=2), swapping(layers=["blocks.*"]))
    same_as_resident(Stack(depth=6), swapping(layers=["blocks.*"]))


def test_two_models_side_by_side():
    first, second = Stack(), Stack(depth=2)
    one, other = swapping(), swapping()
    with attached(one, first), attached(other, second), one.step(), other.step():
        first(second(stack_inputs(0, 0)).repeat(1, 2)).sum().backward()
        assert other.counters()["swapped_bytes"] < one.counters()["swapped_bytes"]


class Attention(nn.Module):
    """Queries, keys and values are chunks of one result, used transposed."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 24)

    def forward(self, hidden):
        query, key, value = self.qkv(hidden).unflatten(-1, (2, 12)).transpose(0, 1).chunk(3, dim=-1)
        scores = F.dropout(torch.softmax(query @ key.transpose(-2, -1), -1), 0.2)
        return (scores @ value).transpose(0, 1).flatten(1)


def test_views_chunks_and_transposes():
    same_as_resident(Attention(), swapping())


def test_convolutions_and_batch_norm():
    model = nn.Sequential(nn.Conv1d(5, 6, 3), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.MaxPool1d(2), nn.Flatten())

    def signal(step: int, microbatch: int) -> torch.Tensor:
        return stack_inputs(step, microbatch).repeat(3, 1).view(3, 5, 8)

    same_as_resident(model, swapping(), signal)


class Borrowing(nn.Module):
    """Blocks in which a module without parameters computes with those of the block."""

    class Unit(nn.Module):
        class Scale(nn.Module):
            def forward(self, hidden, scale):
                return torch.tanh(hidden * scale)

        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.full((8,), 1.5))
            self.multiply = self.Scale()

        def forward(self, hidden):
            return self.multiply(hidden, self.scale)

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Unit() for _ in range(4))
        for block in self.blocks:
            nn.init.normal_(block.scale)

    def forward(self, hidden):
        for block in self.blocks:
            hidden = block(hidden)
        return hidden


def test_weights_in_slots_are_saved_by_name_also_where_swapping_begins_inside_their_window():
    same_as_resident(Borrowing(), swapping(LayerStream(slots=1), layers=["*.multiply"]))


def test_autocast():
    class Cast(nn.Module):
        def __init__(self):
            super().__init__()
            self.body = Stack()

        def forward(self, inputs):
            with torch.autocast("cpu", torch.bfloat16):
                return self.body(inputs)

    same_as_resident(Cast(), swapping())
    same_as_resident(Cast(), swapping(LayerStream(layers="body.blocks", slots=1)))


def test_the_input_batch_and_parameters_are_never_swapped():
    model, mode = nn.Linear(8, 4), swapping()
    inputs = stack_inputs(0, 0)
    with attached(mode, model):
        for call in (model, lambda batch: model(input=batch)):
            with mode.step():
                call(inputs.t().contiguous().t()).sum().backward()
        assert mode.counters()["swapped_bytes"] == 0
        with mode.step():
            model(inputs).square().sum().backward()
        assert torch.equal(inputs, stack_inputs(0, 0))


def test_what_is_swapped_is_released_and_comes_back():
    model, mode = Stack(), swapping()
    storages = []
    for block in model.blocks[:-1]:
        block.register_forward_hook(lambda *call: storages.append(StorageWeakRef(call[2].untyped_storage())))
    with attached(mode, model):
        with mode.step():
            loss = model(stack_inputs(0, 0)).sum()
            assert all(storage.expired() for storage in storages)
            loss.backward()
        counters = mode.counters()
    assert counters["released_bytes"] == counters["h2d_bytes"]
    assert 0.9 * counters["swapped_bytes"] < counters["h2d_bytes"] < counters["swapped_bytes"]
    assert counters["d2h_bytes"] == counters["swapped_bytes"]


def test_the_counters_of_weights_and_activations_are_one_set():
    def counters(mode) -> dict:
        model = Stack()
        with attached(mode, model):
            for _ in range(2):
                with mode.step():
                    model(stack_inputs(0, 0)).sum().backward()
                model.zero_grad()
            return mode.counters()

    both, weights, swap = (counters(mode) for mode in (swapping(LayerStream()), LayerStream(), swapping()))
    for key in ("h2d_bytes", "d2h_bytes", "host_pageable_bytes"):
        assert both[key] == weights[key] + swap[key], key
    assert set(weights) < set(both)


def test_one_plan_for_both():
    model = Stack()
    mode = TensorSwap(LayerStream(), budget="4MiB", prefetch="1MiB", host_budget="2GiB")
    plan, weights = mode.plan(model, recompute=True), LayerStream().plan(model, recompute=True)
    assert (plan.h2d_bytes, plan.units) == (weights.h2d_bytes, weights.units)
    assert (plan.activation_window_bytes, plan.activation_budget_bytes) == (2**20, 4 * 2**20)
    assert dict(plan.rows())["activations on the host, at most"] == "2.00 GiB"
    assert plan.rows()[: len(weights.rows())] == weights.rows()
    rows = dict(TensorSwap(Resident(), budget="auto").plan(model).rows())
    assert rows["activations on the host, at most"] == "what is free"


def test_host_memory_stays_within_its_budget_and_is_given_back():
    model, mode = Stack(), swapping(host_budget=5 * 4096)
    with attached(mode, model):
        with mode.step():
            model(stack_inputs(0, 0)).sum().backward()
        assert mode.counters()["host_pageable_bytes"] == 5 * 4096
        arena = mode._arena
    assert arena.pageable_bytes == 0


def swapped_in(mode: TensorSwap, model: nn.Module) -> float:
    with attached(mode, model):
        with mode.step():
            model(stack_inputs(0, 0)).sum().backward()
        model.zero_grad()
        return mode.counters()["swapped_bytes"]


def test_patterns_choose_the_outermost_modules_that_match():
    everything = swapped_in(swapping(layers=["blocks.*"]), Stack())
    assert swapped_in(swapping(layers=["blocks.*", "*.up", "blocks.0.norm"]), Stack()) == everything
    up = swapped_in(swapping(layers=["blocks.[12].up"]), Stack())
    assert up == 2 * 5 * 16 * 4
    assert 4 * up / 2 < everything


@pytest.mark.parametrize("layers", [None, ["blocks.*"]])
def test_the_last_blocks_keep_theirs(layers: list | None):
    every, but_two = (swapped_in(swapping(layers=layers, keep_last=count), Stack()) for count in (0, 2))
    a_block = swapped_in(swapping(layers=["blocks.2"]), Stack())
    assert every - but_two == pytest.approx(2 * a_block, abs=5 * 16 * 4)
    assert swapped_in(swapping(layers=["blocks.*"], keep_last=4), Stack()) == 0


def test_the_last_blocks_keep_theirs_over_streamed_weights():
    every, but_two = (swapped_in(swapping(LayerStream(slots=1), keep_last=count), Stack()) for count in (0, 2))
    assert but_two < every


def wanted(tensor: torch.Tensor) -> bool:
    return tensor.shape[-1] == 32


def test_a_predicate_by_import_path():
    mode = swapping(predicate=f"{__name__}.wanted")
    # What gelu and down save, once each in four blocks.
    assert swapped_in(mode, Stack()) == 2 * 4 * 5 * 32 * 4


def test_a_budget_keeps_what_is_used_first_and_saves_its_traffic():
    model, mode = Stack(), swapping(budget=2000)
    with attached(mode, model):
        traffic = []
        for _ in range(3):
            before = mode.counters()
            with mode.step():
                model(stack_inputs(0, 0)).sum().backward()
            model.zero_grad()
            traffic.append(mode.counters()["d2h_bytes"] - before["d2h_bytes"])
    assert traffic[0] - 2000 <= traffic[1] == traffic[2] < traffic[0] - 1000


def test_what_was_swapped_comes_back_while_backward_uses_what_stayed(monkeypatch: pytest.MonkeyPatch):
    """Within the budget there is room for what is wanted next as soon as what stayed has been used."""
    came_back, fetched = ActivationOffloader._return, []

    def watched(self, packed):
        fetched.append(self.fetched_bytes)
        return came_back(self, packed)

    monkeypatch.setattr(ActivationOffloader, "_return", watched)
    mode, model = TensorSwap(Resident(), min_bytes=1, budget=9000, prefetch=0), Stack(depth=6)
    with attached(mode, model):
        for step in range(2):
            before = mode.counters()["activation_h2d_bytes"]
            fetched.clear()
            with mode.step():
                model(stack_inputs(step, 0)).mean().backward()
    # At the first use of what was swapped, some of it is on its way already.
    assert fetched[0] > before


def test_evaluation_is_left_alone():
    model, mode = Stack(), swapping()
    with attached(mode, model):
        with mode.step(), torch.no_grad():
            model(stack_inputs(0, 0))
        # Outside a step autograd works as if the mode were not there.
        model(stack_inputs(0, 0)).sum().backward()
        assert mode.counters()["swapped_bytes"] == 0


def test_gradients_within_evaluation_are_left_alone():
    class Energy(nn.Module):
        """Its output is a slope, in evaluation too."""

        def __init__(self):
            super().__init__()
            self.body = Stack()

        def forward(self, inputs):
            with torch.enable_grad():
                leaf = inputs.clone().requires_grad_()
                return torch.autograd.grad(self.body(leaf).square().sum(), leaf)[0]

    model, mode = Energy(), swapping()
    with attached(mode, model), mode.step():
        with torch.no_grad():
            quiet = model(stack_inputs(0, 0))
        assert mode.counters()["swapped_bytes"] == 0
        assert torch.equal(quiet, model(stack_inputs(0, 0)))
        assert mode.counters()["swapped_bytes"] > 0


def test_an_aborted_step_leaves_nothing_and_the_next_is_right():
    model, mode = Stack(), swapping()
    expected = train(copy.deepcopy(model), Resident(), steps=1)

    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    def interrupt(*_):
        raise KeyboardInterrupt

    def error(*_):
        raise ValueError

    with attached(mode, model):
        for hook, raised in (
            (interrupt, KeyboardInterrupt),
            (error, ValueError),
            (lambda *call: Fails.apply(call[2]), ZeroDivisionError),
        ):
            handle = model.blocks[2].up.register_forward_hook(hook)
            with pytest.raises(raised), mode.step():
                model(stack_inputs(0, 0)).sum().backward()
            handle.remove()
            model.zero_grad()
            assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
            # The exception's traceback has the tensors of its frames.
            gc.collect()
            with mode.step():
                pool = mode._activations.pool
            assert pool.held_bytes == pool.idle_bytes
    assert_same(train(model, mode, steps=1), expected)


def test_an_exception_that_forward_catches_closes_what_it_opened():
    class Tolerant(nn.Module):
        def __init__(self):
            super().__init__()
            self.bad, self.good = nn.Linear(9, 8), nn.Linear(8, 8)

        def forward(self, hidden):
            try:
                return self.bad(hidden)
            except RuntimeError:
                return self.good(hidden).square()

    model, mode = Tolerant(), swapping(layers=["bad"])
    with attached(mode, model), mode.step():
        model(stack_inputs(0, 0)).sum().backward()
        assert mode.counters()["swapped_bytes"] == 0


def test_copies_of_the_model_swap_nothing():
    model, mode = Stack(), swapping()
    with attached(mode, model), mode.step():
        for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            other(stack_inputs(0, 0)).sum().backward()
            assert mode.counters()["swapped_bytes"] == 0


def test_detach_gives_the_model_back():
    model, mode = Stack(), swapping(LayerStream(), layers=["blocks.*"])
    with attached(mode, model):
        with pytest.raises(RuntimeError, match="holds a model already"):
            mode.attach(model, None)
        with mode.step():
            with pytest.raises(RuntimeError, match="a step is open already"), mode.step():
                pass
            with pytest.raises(RuntimeError, match="detach inside a step"):
                mode.detach()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert not any("forward" in module.__dict__ for module in model.modules())
    same_as_resident(model, mode)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"layers": ["encoder.*"]}, r"offload.layers=\['encoder.\*'\]: no module has such a name; .* stem, blocks"),
        ({"keep_last": 5}, "offload.keep_last=5: must be between 0 and the 4"),
        ({"keep_last": -1}, "offload.keep_last=-1"),
        ({"budget": "much"}, "offload.budget=much: must be bytes, .* or auto"),
        ({"host_budget": "1GB"}, "offload.host_budget=1GB: must be bytes"),
        ({"prefetch": -1}, "offload.prefetch=-1: must be bytes"),
        ({"min_bytes": "x"}, "offload.min_bytes=x: must be bytes"),
        ({"predicate": "nowhere.at.all"}, "offload.predicate=nowhere.at.all: no such function"),
        ({"predicate": "wanted"}, "offload.predicate=wanted: no such function"),
        ({"pin": "on"}, "offload.pin=on: must be auto or off"),
    ],
)
def test_knobs_that_do_not_fit_are_refused(knobs: dict, message: str):
    with pytest.raises(ValueError, match=message):
        swapping(**knobs).plan(Stack())


def test_keeping_the_last_blocks_of_a_model_without_blocks_is_refused():
    with pytest.raises(ValueError, match=r"offload.keep_last=1: this model has no list of blocks"):
        swapping(keep_last=1).plan(nn.Linear(2, 2))


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("checkpointing", [None, "non-reentrant"])
def test_save_on_cpu_equals_resident(weights: str, checkpointing: str | None):
    same_as_resident(Stack(recompute=checkpointing, dropout=0.3), SaveOnCpu(WEIGHTS[weights]()))


def test_save_on_cpu_copies_what_is_saved_in_a_step():
    model, mode = nn.Linear(8, 4), SaveOnCpu(Resident())
    inputs = stack_inputs(0, 0).requires_grad_()
    with attached(mode, model):
        assert mode.plan(model).resident_bytes == Resident().plan(model).resident_bytes
        with mode.step():
            assert model(inputs).grad_fn._saved_mat1 is not None
            hooked = torch._C._autograd._top_saved_tensors_default_hooks(True)
            model.register_forward_pre_hook(
                lambda *_: seen.append(torch._C._autograd._top_saved_tensors_default_hooks(True))
            )
            seen = []
            model(inputs)
        assert hooked is None
        assert "save_on_cpu" in seen[0][0].__qualname__
