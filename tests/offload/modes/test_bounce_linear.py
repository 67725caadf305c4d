"""bounce_linear computes the resident model's numbers, bit for bit, and moves the bytes of its footprint."""

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.modes.bounce_linear import BounceLinear
from offload.modes.none import Resident
from tests.offload.helpers.models import (
    Block,
    Shared,
    Stack,
    assert_same,
    normal,
    same_as_resident,
    stack_inputs,
    tokens,
    train,
    under,
)


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_equals_resident(slots: int, recompute: str | None):
    same_as_resident(Stack(recompute=recompute, dropout=0.3), BounceLinear(slots=slots))


def test_equals_resident_under_autocast():
    class Autocast(Stack):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, inputs):
            return super().forward(inputs)

    for recompute in (None, "non-reentrant"):
        same_as_resident(Autocast(recompute=recompute), BounceLinear(slots=1))


@pytest.mark.parametrize("amount", ["40%", "3KiB"])
def test_equals_resident_with_some_layers_resident(amount: str):
    same_as_resident(Stack(), BounceLinear(slots=2, resident=amount))


def test_resident_layers_are_not_copied():
    moved = []
    for amount in (0, "50%", "100%"):
        mode, model = BounceLinear(slots=1, resident=amount), Stack()
        with under(mode, model) as attached:
            with attached.step():
                model(stack_inputs(0, 0)).sum().backward()
            moved.append(attached.counters().h2d_bytes)
    assert moved[0] > 1.5 * moved[1] > 0
    assert moved[2] == 0


def test_frozen_layers_get_no_gradient_and_are_not_fetched_for_backward():
    model = Stack()
    for parameter in (*model.stem.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad = False
    same_as_resident(copy.deepcopy(model), BounceLinear(slots=2))
    mode = BounceLinear(slots=1)
    plan = mode.footprint(model)
    with under(mode, model) as attached:
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        assert model.stem.weight.grad is None
        assert attached.counters().d2h_bytes == sum(
            p.nbytes for module in model.modules() if isinstance(module, nn.Linear)
            for p in module.parameters() if p.requires_grad
        )  # fmt: skip
        frozen_bytes = sum(
            p.nbytes for p in (model.stem, model.blocks[0].up, model.blocks[0].down) for p in p.parameters()
        )
        # Forward reads everything, backward no frozen layer, since nothing before them trains.
        assert attached.counters().h2d_bytes <= plan.h2d_bytes - frozen_bytes


@pytest.mark.parametrize("recompute", [None, "non-reentrant"])
@pytest.mark.parametrize("slots", [1, 3])
def test_parameters_outside_layers_stream_with_the_layer_that_follows(slots: int, recompute: str | None):
    model, mode = Stack(recompute=recompute), BounceLinear(outside="stream", slots=slots)
    plan = mode.footprint(model)
    assert plan.resident_bytes == 0
    assert plan.units == BounceLinear().footprint(model).units
    same_as_resident(model, mode)


def test_shared_and_tied_weights_have_one_home():
    mode, model = BounceLinear(slots=2), Shared()
    same_as_resident(model, mode, tokens)
    assert mode.footprint(model).host_weight_bytes == 256 * 3
    with under(mode, model):
        assert model.again.weight is model.layer.weight
        assert model.head.weight is model.embed.weight


class Mixture(nn.Module):
    """Experts in one tensor each, and a layer that is no nn.Linear: as transformers' Mixtral and GPT-2 have them."""

    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 3) / 3)

        def forward(self, hidden):
            return hidden @ self.weight

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.act = nn.Parameter(torch.randn(3, 8, 8) / 3), nn.GELU()

        def forward(self, hidden, shares):
            return (self.act(torch.einsum("bi,eij->bej", hidden, self.up)) * shares[..., None]).sum(1)

    def __init__(self):
        super().__init__()
        self.table, self.router, self.experts = nn.Embedding(5, 8), self.Transposed(), self.Experts()
        self.mixes = nn.ParameterList([torch.eye(8)])

    def forward(self, hidden):
        hidden = hidden + self.table.weight[0]
        return self.experts(hidden, self.router(hidden).softmax(-1)) @ self.mixes[0]


def test_layers_of_other_packages_stream_too():
    same_as_resident(Mixture(), BounceLinear(slots=2))
    footprint = BounceLinear(slots=2).footprint(Mixture())
    # The experts; the router, whose 96 bytes take 256. The table and the list, which their parent reads, stay.
    assert footprint.host_weight_bytes == 4 * 3 * 8 * 8 + 256
    assert footprint.resident_bytes == 4 * (5 * 8 + 8 * 8)


def test_keyword_input_and_root_linear():
    model = nn.Linear(8, 4)
    inputs = stack_inputs(0, 0)
    expected = model(inputs)
    mode = BounceLinear()
    with under(mode, model), torch.no_grad():
        assert torch.equal(model(input=inputs), expected)


class Gated(nn.Module):
    """A block as in Llama: no biases, three-dimensional inputs, more layers than slots."""

    def __init__(self, width: int):
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, hidden):
        inner = self.norm(hidden)
        return hidden + self.down(F.silu(self.gate(inner)) * self.up(inner))


def checkpointed(depth: int = 3) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), *(Gated(8) for _ in range(depth)))
    for block in list(model)[1:]:
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)
    return model


@pytest.mark.parametrize("slots", [1, 2, 3, 5])
def test_a_weight_unpacked_before_the_recompute_that_its_operation_starts(slots: int):
    """Autograd may fetch a product's weight first and then its input, whose recompute uses the whole block."""
    inputs = normal(2, 3, 8)
    assert_same(train(checkpointed(), BounceLinear(slots=slots), inputs), train(checkpointed(), Resident(), inputs))


def test_too_few_slots_for_nested_windows_are_refused():
    model = nn.ModuleDict({"outer": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    model["outer"].forward = lambda hidden: model["other"](hidden) @ model["outer"].weight
    with under(BounceLinear(slots=2), model), torch.no_grad():
        model["outer"](torch.ones(8))
    with (
        under(BounceLinear(slots=1), model),
        torch.no_grad(),
        pytest.raises(
            RuntimeError, match=r"a device slot is needed while all 1 are in use by outer: give the mode more slots"
        ),
    ):
        model["outer"](torch.ones(8))


class Wandering(nn.Module):
    """Uses different blocks in a different order each time."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block(8) for _ in range(4))
        self.calls = 0

    def forward(self, hidden):
        self.calls += 1
        order = ([0, 1, 2, 3], [0, 2, 3], [3, 1, 0, 1], [2], [0, 1, 2, 3])[self.calls % 5]
        for index in order:
            hidden = self.blocks[index](hidden)
        return hidden


def test_steps_that_depart_from_the_recorded_order():
    same_as_resident(Wandering(), BounceLinear(slots=3), steps=8, microbatches=1)


def test_include_and_exclude_choose_layers():
    model = Stack()
    assert BounceLinear(include=["blocks.*"]).footprint(model).units == 8
    assert BounceLinear(include=["blocks.*"], exclude=["*.up"]).footprint(model).units == 4
    assert BounceLinear(exclude=["*"]).footprint(model).units == 0
    for knobs in ({"include": ["*.down", "head"]}, {"exclude": ["*"]}):
        same_as_resident(model, BounceLinear(**knobs))


def test_held_and_moved_bytes_are_those_of_the_footprint():
    model, mode = Stack(), BounceLinear(slots=3)
    plan = mode.footprint(model)
    with under(mode, model) as attached:
        for _ in range(2):
            before = attached.counters()
            with attached.step():
                model(stack_inputs(0, 0)).sum().backward()
            model.zero_grad()
            after = attached.counters()
            assert 0 < after.h2d_bytes - before.h2d_bytes <= plan.h2d_bytes
        streamed = sum(p.nbytes for name, p in model.named_parameters() if "norm" not in name)
        assert after.d2h_bytes - before.d2h_bytes == streamed
        assert after.host_pageable_bytes == plan.host_weight_bytes + plan.host_gradient_bytes


def test_nothing_is_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Stack(recompute="non-reentrant"), BounceLinear())
