"""Stand-ins of quantised weights are made once a slot, and anew where they or the weights have got something else."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from models import quantise
from models.quantise import QuantisedWeight
from models.quantise_formats import Int8
from offload.modes.layer_stream import LayerStream
from tests.offload.helpers.models import under
from tests.offload.helpers.quantised import WIDTH, Model, inputs, same_as_resident


class Scaled(torch.Tensor):
    """Integers times scales times a number; the two tensors are in a list, or in two attributes."""

    @staticmethod
    def __new__(cls, held: list[Tensor], factor: float, listed: bool):
        return torch.Tensor._make_wrapper_subclass(cls, held[0].shape, dtype=torch.float32, device=held[0].device)

    def __init__(self, held: list[Tensor], factor: float, listed: bool):
        self.factor, self.listed = factor, listed
        if listed:
            self.held = held
        else:
            self.first, self.second = held

    @property
    def integers(self) -> Tensor:
        return self.held[0] if self.listed else self.first

    @property
    def scale(self) -> Tensor:
        return self.held[1] if self.listed else self.second

    def give_scale(self, scale: Tensor) -> None:
        if self.listed:
            self.held[1] = scale
        else:
            self.second = scale

    def matrix(self) -> Tensor:
        return self.integers.float() * self.scale * self.factor

    def __tensor_flatten__(self):
        return ["integers", "scale"], (self.factor, self.listed)

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls([inner["integers"], inner["scale"]], *context)

    @classmethod
    def __torch_dispatch__(cls, function, types, arguments=(), keywords=None):
        own = arguments[0]
        if function in (torch.ops.aten.detach.default, torch.ops.aten.clone.default):
            return cls([function(own.integers), function(own.scale)], own.factor, own.listed)
        raise NotImplementedError(str(function))


class Layer(nn.Module):
    """Its weight is a `Scaled`, with which `change` does something in each forward."""

    def __init__(self, listed: bool, change: Callable[[Scaled], None]):
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        integers = torch.randint(-9, 9, (WIDTH, WIDTH), generator=generator, dtype=torch.int8)
        scale = torch.rand(WIDTH, 1, generator=generator) / 50
        self.weight = nn.Parameter(Scaled([integers, scale], 1.0, listed), requires_grad=False)
        self.change = change

    def forward(self, rows: Tensor) -> Tensor:
        with torch.no_grad():
            self.change(self.weight)
        return rows @ self.weight.matrix().t()


def leaves_it(weight: Scaled) -> None:
    """Changes nothing."""


def gives_a_scale(weight: Scaled) -> None:
    weight.give_scale(weight.scale * 1.25)


def gives_data(weight: Scaled) -> None:
    weight.scale.data = weight.scale * 1.25


def scale_is_doubled(model: Model) -> None:
    with torch.no_grad():
        model.blocks[1].second.weight.scale.mul_(2)


def another_scale(model: Model) -> None:
    weight = model.blocks[1].second.weight
    weight.give_scale(weight.scale * 2)


def another_factor(model: Model) -> None:
    model.blocks[1].second.weight.factor = 3.0


def another_weight(model: Model) -> None:
    weight = model.blocks[1].second.weight
    held = [weight.integers.clone(), weight.scale.clone()]
    model.blocks[1].second.weight = nn.Parameter(Scaled(held, 3.0, weight.listed), requires_grad=False)


LISTED = pytest.mark.parametrize("listed", [False, True], ids=["attributes", "list"])
CHANGES = pytest.mark.parametrize("change", [leaves_it, gives_a_scale, gives_data])


@pytest.mark.parametrize("between", [scale_is_doubled, another_scale, another_factor, another_weight])
@CHANGES
@LISTED
def test_numbers_are_those_of_a_resident_model(listed: bool, change: Callable, between: Callable):
    made = Model("nested")
    made.blocks[1].second = Layer(listed, change)
    same_as_resident(made, LayerStream(slots=1), between=between)


@CHANGES
@LISTED
def test_what_its_user_changes_inside_a_step_is_used(listed: bool, change: Callable):
    made = Model("nested")
    made.blocks[1].second = Layer(listed, change)
    resident = copy.deepcopy(made)
    mode = LayerStream(slots=1)
    with under(mode, made) as attached, attached.step():
        for model in (made, resident):
            model(inputs(0, 0)).sum().backward()
            scale_is_doubled(model)
        assert torch.equal(made(inputs(0, 1)), resident(inputs(0, 1)))


def quantised_model() -> Model:
    made, generator = Model("nested"), torch.Generator().manual_seed(2)
    for block in made.blocks:
        for layer in (block.first.base, block.second):
            weight = QuantisedWeight.empty(Int8(), torch.empty(WIDTH, WIDTH))
            with torch.no_grad():
                weight.copy_(torch.randn(WIDTH, WIDTH, generator=generator) / 8)
            layer.weight = nn.Parameter(weight, requires_grad=False)
    return made


def test_backward_makes_none_where_the_slot_has_one(monkeypatch: pytest.MonkeyPatch):
    made, counts = quantised_model(), []
    original = QuantisedWeight.__new__

    def counted(*arguments: object, **keywords: object) -> QuantisedWeight:
        counts[-1] += 1
        return original(*arguments, **keywords)

    mode = LayerStream(slots=2)
    with under(mode, made) as attached:
        for step in range(6):
            counts.append(0)
            monkeypatch.setattr(QuantisedWeight, "__new__", staticmethod(counted))
            with attached.step():
                made(inputs(step, 0)).sum().backward()
            monkeypatch.undo()
            made.zero_grad()
    assert counts[0] > 0 == counts[-1]


class Times(torch.autograd.Function):
    """`rows` times the first row of a weight, which is saved, and saved again where backward has a graph."""

    @staticmethod
    def forward(ctx, rows: Tensor, weight: QuantisedWeight) -> Tensor:
        ctx.save_for_backward(weight)
        return rows * weight.dequantised()[0]

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return Times.apply(gradient, *ctx.saved_tensors), None


def test_second_derivatives_do_not_use_the_slot(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(
        quantise, "_Product", SimpleNamespace(apply=lambda rows, bias, weight: Times.apply(rows, weight))
    )
    made = quantised_model()
    resident = copy.deepcopy(made)
    mode = LayerStream(slots=1)
    found = []
    with under(mode, made) as attached, attached.step():
        for model in (made, resident):
            given = inputs(0, 0)
            (first,) = torch.autograd.grad(model(given).square().sum(), given, create_graph=True)
            (second,) = torch.autograd.grad(first.square().sum(), given)
            found.append((first, second))
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))
