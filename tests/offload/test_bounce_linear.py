"""bounce_linear computes the resident model's numbers, bit for bit, and moves what it says it moves."""

from __future__ import annotations

import copy
import functools
import warnings

import pytest
import torch
import torch.nn.functional as F
from support import Block, Stack, assert_same, attached, stack_inputs, train, twin
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.modes.bounce_linear import BounceLinear
from offload.modes.none import Resident


def same_as_resident(model: nn.Module, inputs=stack_inputs, mode: BounceLinear | None = None, **options) -> None:
    streamed, resident = twin(model)
    assert_same(
        train(streamed, mode or BounceLinear(slots=2), inputs, **options),
        train(resident, Resident(), inputs, **options),
    )


@pytest.mark.parametrize("recompute", [None, "reentrant", "non-reentrant"])
@pytest.mark.parametrize("slots", [1, 2, 3, 9])
def test_equals_resident(slots: int, recompute: str | None):
    same_as_resident(Stack(recompute=recompute, dropout=0.3), mode=BounceLinear(slots=slots))


@pytest.mark.parametrize("microbatches", [1, 3])
def test_equals_resident_with_accumulation(microbatches: int):
    same_as_resident(Stack(), microbatches=microbatches)


def test_equals_resident_in_bf16():
    same_as_resident(Stack().bfloat16(), lambda step, micro: stack_inputs(step, micro).bfloat16())


def test_equals_resident_under_autocast():
    class Autocast(Stack):
        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, inputs):
            return super().forward(inputs)

    same_as_resident(Autocast(), mode=BounceLinear(slots=1))
    same_as_resident(Autocast(recompute="non-reentrant"), mode=BounceLinear(slots=1))


@pytest.mark.parametrize("amount", ["3", "40%", "3KiB", 9])
def test_equals_resident_with_some_layers_resident(amount: str | int):
    same_as_resident(Stack(), mode=BounceLinear(slots=2, resident=amount))


def test_resident_layers_are_not_copied():
    moved = []
    for amount in (0, "50%", "100%"):
        mode, model = BounceLinear(slots=1, resident=amount), Stack()
        with attached(mode, model):
            with mode.step():
                model(stack_inputs(0, 0)).sum().backward()
            moved.append(mode.counters()["h2d_bytes"])
    assert moved[0] > 1.5 * moved[1] > 0
    assert moved[2] == 0


def test_frozen_layers_get_no_gradient_and_are_not_fetched_for_backward():
    model = Stack()
    for parameter in (*model.stem.parameters(), *model.blocks[0].parameters()):
        parameter.requires_grad = False
    same_as_resident(copy.deepcopy(model))
    mode = BounceLinear(slots=1)
    plan = mode.plan(model)
    with attached(mode, model):
        with mode.step():
            model(stack_inputs(0, 0)).sum().backward()
        assert model.stem.weight.grad is None
        assert mode.counters()["d2h_bytes"] == sum(
            p.nbytes for module in model.modules() if isinstance(module, nn.Linear)
            for p in module.parameters() if p.requires_grad
        )  # fmt: skip
        frozen_bytes = sum(
            p.nbytes for p in (model.stem, model.blocks[0].up, model.blocks[0].down) for p in p.parameters()
        )
        # Forward reads everything, backward no frozen layer, since nothing before them trains.
        assert mode.counters()["h2d_bytes"] <= plan.h2d_bytes - frozen_bytes


@pytest.mark.parametrize("recompute", [None, "non-reentrant"])
@pytest.mark.parametrize("slots", [1, 3])
def test_others_stream_with_the_layer_that_follows(slots: int, recompute: str | None):
    model, mode = Stack(recompute=recompute), BounceLinear(others="stream", slots=slots)
    plan = mode.plan(model)
    assert plan.resident_bytes == 0
    assert plan.units == BounceLinear().plan(model).units
    same_as_resident(model, mode=mode)


def test_others_stream_in_odd_models():
    def inputs(step, microbatch):
        return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(10 * step + microbatch))

    same_as_resident(Attending(), inputs, BounceLinear(others="stream", slots=2))
    same_as_resident(Shared(), tokens, BounceLinear(others="stream", slots=2))


class Quantised(nn.Linear):
    """A frozen layer that keeps its weight in int8 with a scale per row, as buffers."""

    def __init__(self, width: int):
        super().__init__(width, width)
        scale = self.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("scale", scale)
        self.register_buffer("quantised", (self.weight.detach() / scale).round().to(torch.int8))
        del self.weight
        self.bias.requires_grad = False

    def forward(self, hidden):
        assert self.quantised.dtype == torch.int8
        return F.linear(hidden, self.quantised.to(hidden.dtype) * self.scale, self.bias)


class Adapted(nn.Module):
    """A low-rank adapter (Hu et al. 2021) around a layer."""

    def __init__(self, base: nn.Linear, rank: int = 2):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + self.up(self.down(hidden))


def test_adapters_on_quantised_layers():
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(*(Adapted(Quantised(8)) for _ in range(3)))

    assert_same(train(model(), BounceLinear(slots=2), stack_inputs), train(model(), Resident(), stack_inputs))
    mode, adapted = BounceLinear(slots=2), model()
    with attached(mode, adapted):
        with mode.step():
            adapted(stack_inputs(0, 0)).sum().backward()
        # Quantised weights come in as int8; only the adapters' gradients go out.
        adapters = sum(p.nbytes for p in adapted.parameters() if p.requires_grad)
        assert mode.counters()["d2h_bytes"] == adapters


def test_moving_an_attached_model_is_refused():
    model, mode = Stack(), BounceLinear()
    with attached(mode, model):
        moved = [p.data for p in model.parameters()]
        model.stem.to(torch.float64)
        with pytest.raises(RuntimeError, match=r"stem\.weight was moved or replaced while attached"), mode.step():
            pass
        for parameter, data in zip(model.parameters(), moved, strict=True):
            parameter.data = data


class Shared(nn.Module):
    """One layer used three times, and a head tied to the embedding."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.layer = nn.Linear(8, 8)
        self.again = nn.Linear(8, 8)
        self.again.weight = self.layer.weight
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        hidden = self.embed(tokens)
        for layer in (self.layer, self.again, self.layer):
            hidden = torch.tanh(layer(hidden))
        return self.head(hidden)


def tokens(step: int, microbatch: int) -> torch.Tensor:
    return torch.randint(11, (3, 5), generator=torch.Generator().manual_seed(10 * step + microbatch))


def test_shared_and_tied_weights_have_one_home():
    same_as_resident(Shared(), tokens)
    mode, model = BounceLinear(slots=2), Shared()
    assert mode.plan(model).host_weight_bytes == 256 * 3
    with attached(mode, model):
        assert model.again.weight is model.layer.weight
        assert model.head.weight is model.embed.weight


class Convolutional(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 6, 3, padding="same", padding_mode="reflect", groups=3)
        self.norm = nn.BatchNorm2d(6)
        self.strided = nn.Conv2d(6, 4, 3, stride=2, dilation=2, bias=False)
        self.line = nn.Conv1d(4, 5, 2)
        self.head = nn.Linear(5, 2)

    def forward(self, images):
        hidden = self.strided(F.relu(self.norm(self.conv(images))))
        return self.head(self.line(hidden.flatten(2)).mean(-1))


def test_convolutions_with_batch_norm():
    def images(step, microbatch):
        return torch.randn(2, 3, 9, 9, generator=torch.Generator().manual_seed(10 * step + microbatch))

    streamed, resident = twin(Convolutional())
    assert_same(train(streamed, BounceLinear(slots=1), images), train(resident, Resident(), images))
    assert torch.equal(streamed.norm.running_var, resident.norm.running_var)


class Attending(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
        self.scale = nn.Parameter(torch.ones(8))
        self.head = nn.Linear(8, 3)

    def forward(self, hidden):
        hidden = hidden + self.attention(hidden, hidden, hidden, need_weights=False)[0]
        return self.head(self.layer(hidden) * self.scale)


def test_modules_that_read_their_children_directly():
    def inputs(step, microbatch):
        return torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(10 * step + microbatch))

    same_as_resident(Attending(), inputs)


@pytest.mark.parametrize("shape", [(8,), (3, 8), (2, 3, 8), (2, 2, 3, 8)])
def test_inputs_of_any_dimension(shape: tuple[int, ...]):
    same_as_resident(
        nn.Sequential(nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 4)),
        lambda step, micro: torch.randn(shape, generator=torch.Generator().manual_seed(step)),
    )


def test_keyword_input_and_root_linear():
    model = nn.Linear(8, 4)
    inputs = stack_inputs(0, 0)
    expected = model(inputs)
    mode = BounceLinear()
    with attached(mode, model), torch.no_grad():
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
    """Autograd may fetch a product's weight first and then its input, whose recompute visits the whole block."""

    def inputs(step, microbatch):
        return torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(10 * step + microbatch))

    assert_same(train(checkpointed(), BounceLinear(slots=slots), inputs), train(checkpointed(), Resident(), inputs))


def test_too_few_slots_for_nested_windows_are_refused():
    model = nn.ModuleDict({"outer": nn.Linear(8, 8), "other": nn.Linear(8, 8)})
    model["outer"].forward = lambda hidden: model["other"](hidden) @ model["outer"].weight
    with attached(BounceLinear(slots=2), model), torch.no_grad():
        model["outer"](torch.ones(8))
    with (
        attached(BounceLinear(slots=1), model),
        torch.no_grad(),
        pytest.raises(
            RuntimeError, match=r"a device slot is needed while all 1 are in use by outer: raise offload.slots"
        ),
    ):
        model["outer"](torch.ones(8))


class Wandering(nn.Module):
    """Uses other blocks in another order each time."""

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


def test_steps_that_depart_from_the_itinerary():
    same_as_resident(Wandering(), mode=BounceLinear(slots=3), steps=8, microbatches=1)


def test_two_forwards_before_one_backward_and_an_evaluation_in_between():
    def run(mode, model):
        with attached(mode, model):
            with mode.step():
                first, second = model(stack_inputs(0, 0)), model(stack_inputs(0, 1))
                with torch.no_grad():
                    model(stack_inputs(0, 2))
                (first.square().mean() + second.square().mean()).backward()
            return [p.grad.clone() for p in model.parameters()]

    streamed, resident = twin(Stack())
    assert_same(run(BounceLinear(slots=1), streamed), run(Resident(), resident))


def test_retained_graph_and_second_derivatives():
    def run(mode, model):
        with attached(mode, model), mode.step():
            inputs = stack_inputs(0, 0).requires_grad_()
            loss = model(inputs).square().mean()
            loss.backward(retain_graph=True)
            (slope,) = torch.autograd.grad(loss, inputs, create_graph=True)
            slope.square().sum().backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    streamed, resident = twin(Stack())
    assert_same(run(BounceLinear(slots=1), streamed), run(Resident(), resident))


def test_weights_changed_between_evaluations_are_seen():
    model, mode = Stack(), BounceLinear(slots=9)
    with attached(mode, model), torch.no_grad():
        for _ in range(3):
            for parameter in model.parameters():
                parameter.data.mul_(1.5)
            assert torch.equal(model(stack_inputs(0, 0)), copy.deepcopy(model)(stack_inputs(0, 0)))


def test_weights_changed_between_forward_and_backward_are_refused():
    model, mode = Stack(), BounceLinear(slots=1)
    with attached(mode, model), mode.step():
        loss = model(stack_inputs(0, 0)).sum()
        with torch.no_grad():
            model.blocks[1].up.weight.add_(1)
        with pytest.raises(RuntimeError, match=r"blocks.1.up needed for gradient computation have been modified"):
            loss.backward()


def test_an_in_place_edit_of_a_saved_activation_raises_as_autograd_does():
    model, mode = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4)), BounceLinear()
    with attached(mode, model), mode.step():
        hidden = model[0](stack_inputs(0, 0))
        out = model[1](hidden)
        hidden.detach().add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raises_leaves_the_next_one_right(where: str):
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            if where == "forward":
                raise KeyboardInterrupt
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    model, mode = Stack(), BounceLinear(slots=2)
    expected = train(copy.deepcopy(model), Resident(), steps=1, microbatches=1)
    body = model.blocks[2].up.forward
    with attached(mode, model):
        model.blocks[2].up.forward = lambda hidden: Raising.apply(body(hidden))
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)), mode.step():
            model(stack_inputs(0, 0)).sum().backward()
        del model.blocks[2].up.forward
        model.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_same(train(model, mode, steps=1, microbatches=1), expected)


def test_deep_copy_is_an_independent_host_model():
    model, mode = Stack(), BounceLinear(slots=1)
    with attached(mode, model):
        ema = copy.deepcopy(model)
        before = mode.counters()["h2d_bytes"]
        with torch.no_grad():
            for parameter in ema.parameters():
                parameter.zero_()
            assert ema(stack_inputs(0, 0)).abs().sum() == 0
            assert mode.counters()["h2d_bytes"] == before
            assert model(stack_inputs(0, 0)).abs().sum() > 0


def test_two_models_on_one_device_keep_apart():
    first, second = Stack(), Stack(depth=2)
    one, other = BounceLinear(slots=1), BounceLinear(slots=1)
    expected = train(copy.deepcopy(second), Resident())
    with attached(one, first):
        with attached(other, second), torch.no_grad():
            first(second(stack_inputs(0, 0)).repeat(1, 2))
        assert_same(train(second, BounceLinear(slots=2)), expected)
        with one.step():
            first(stack_inputs(0, 0)).sum().backward()


def test_detach_gives_the_model_back():
    model = Stack()
    parameters = list(model.parameters())
    mode = BounceLinear()
    state = copy.deepcopy(model.state_dict())
    with attached(mode, model):
        assert list(model.state_dict()) == list(state)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(stack_inputs(0, 0)).sum().backward()


def test_meta_models_materialise_at_home():
    with torch.device("meta"):
        model = Shared()
    mode = BounceLinear()
    with attached(mode, model):
        assert not any(p.is_meta for p in model.parameters())
        assert model.head.weight is model.embed.weight
        for parameter in model.parameters():
            nn.init.normal_(parameter)
        with mode.step():
            model(tokens(0, 0)).sum().backward()


def test_gradients_outside_a_step_are_refused():
    model, mode = Stack(), BounceLinear()
    with attached(mode, model):
        with pytest.raises(RuntimeError, match=r"with mode\.step"):
            model(stack_inputs(0, 0))
        with torch.no_grad():
            model(stack_inputs(0, 0))


def test_include_and_exclude_choose_layers():
    model = Stack()
    assert BounceLinear(include=["blocks.*"]).plan(model).units == 8
    assert BounceLinear(include=["blocks.*"], exclude=["*.up"]).plan(model).units == 4
    assert BounceLinear(exclude=["*"]).plan(model).units == 0
    same_as_resident(model, mode=BounceLinear(include=["*.down", "head"]))
    same_as_resident(model, mode=BounceLinear(exclude=["*"]))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"slots": 0}, "offload.slots=0: must be at least 1"),
        ({"slots": 2, "prefetch": 2}, "offload.prefetch=2: must be between 0 and slots - 1 = 1"),
        ({"pin": "yes"}, "offload.pin=yes: must be auto or off"),
    ],
)
def test_knobs_out_of_range_are_refused(options: dict, message: str):
    with pytest.raises(ValueError, match=message):
        BounceLinear(**options)


def test_what_was_planned_is_what_is_held_and_moved():
    model, mode = Stack(), BounceLinear(slots=3)
    plan = mode.plan(model)
    with attached(mode, model):
        for _ in range(2):
            before = mode.counters()
            with mode.step():
                model(stack_inputs(0, 0)).sum().backward()
            model.zero_grad()
            after = mode.counters()
            assert 0 < after["h2d_bytes"] - before["h2d_bytes"] <= plan.h2d_bytes
        held = sum(p.nbytes for name, p in model.named_parameters() if "norm" not in name)
        assert after["d2h_bytes"] - before["d2h_bytes"] == held
        assert after["host_pageable_bytes"] == plan.host_weight_bytes + plan.host_gradient_bytes


def test_nothing_is_warned_about():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        train(Stack(recompute="non-reentrant"), BounceLinear())
