"""A stand-in has the class of its parameter, counts its changes, and refuses what only a leaf can do."""

import copy
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from models import quantise
from models.quantise import QuantisedWeight
from models.quantise_formats import Int8
from offload.memory.device_slots import DeviceSlots
from offload.memory.host_memory import HostArena
from offload.modes.layer_stream import LayerStream
from offload.streams.registry import Streams
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.stand_in import (
    StandIn,
    StandIns,
    data_was_taken,
    forget_data_taken,
    joined_to_host,
    like_host,
    share_of,
)
from tests.offload.helpers.models import under
from tests.offload.helpers.quantised import WIDTH, Model, inputs, same_as_resident
from tests.offload.helpers.units import tensor_of, unit_of_two


def test_stand_ins_are_found_by_the_bytes_of_their_tensors():
    unit = unit_of_two()
    unit.tensors[1].offset = unit.tensors[0].nbytes
    found = StandIns([unit])
    assert [each.tensor for each in found[unit]] == unit.tensors
    assert found.at(unit, 0) is found.at(unit, 3) is found[unit][0]
    assert found.at(unit, 4) is found.at(unit, 7) is found[unit][1]


def test_views_of_a_slot_are_the_same_objects(streams: Streams):
    stand_in = StandIn(tensor_of(nn.Parameter(torch.ones(2, 4))))
    first, second = DeviceSlots(2, 64, streams)
    (view,) = stand_in.views_in(first)
    assert (view.shape, view.dtype, view.data_ptr()) == ((2, 4), torch.float32, first.bytes.data_ptr())
    assert stand_in.views_in(first)[0] is view
    assert stand_in.views_in(second)[0].data_ptr() == second.bytes.data_ptr()


def test_changes_at_home_and_on_the_device_show_in_the_state():
    host = nn.Parameter(torch.ones(3))
    stand_in = StandIn(tensor_of(host))
    version, place = stand_in.state
    stand_in.device = torch.zeros(3)
    stand_in.counted_version = stand_in.version
    assert stand_in.state == (version, place)
    assert not stand_in.count_writes()
    stand_in.device.add_(1).mul_(2)
    assert stand_in.state == (version + 2, place)
    assert stand_in.count_writes()
    assert stand_in.writes == 2
    assert stand_in.state == (version + 2, place)
    with torch.no_grad():
        host.add_(1)
    assert stand_in.state == (version + 3, place)
    host.data = torch.zeros(3)
    assert stand_in.state[1] != place


class Special(nn.Parameter):
    pass


@pytest.fixture
def host() -> nn.Parameter:
    parameter = Special(torch.ones(2))
    parameter.mark = "of before"
    return parameter


@pytest.fixture
def stand_in(host: nn.Parameter) -> torch.Tensor:
    return like_host(host * 1, host)


def test_class_and_attributes(host: nn.Parameter, stand_in: torch.Tensor):
    assert isinstance(stand_in, Special)
    assert type(stand_in).__name__ == "Special"
    assert stand_in.mark == "of before"
    stand_in.calls = 3
    assert host.calls == 3
    host.late = "set outside"
    forget_data_taken(stand_in)
    assert stand_in.late == "set outside"


def test_data_that_was_taken_is_noted(stand_in: torch.Tensor):
    assert not data_was_taken(stand_in)
    stand_in.data.zero_()
    assert data_was_taken(stand_in)
    forget_data_taken(stand_in)
    assert not data_was_taken(stand_in)


def test_what_only_a_leaf_can_do_is_refused_in_one_line(stand_in: torch.Tensor):
    def freeze() -> None:
        stand_in.requires_grad = False

    def set_gradient() -> None:
        stand_in.grad = None

    for use, what in (
        (lambda: stand_in.grad, "is asked for its gradient"),
        (set_gradient, "is asked for its gradient"),
        (freeze, "is frozen or unfrozen"),
        (lambda: stand_in.requires_grad_(False), "is frozen or unfrozen"),
        (lambda: stand_in.register_hook(print), "gets a hook on its gradient"),
        (lambda: stand_in.register_post_accumulate_grad_hook(print), "gets a hook on its gradient"),
    ):
        with pytest.raises(RuntimeError, match=f"^a weight that streams {what} inside a forward: do it before"):
            use()
    assert stand_in.requires_grad_(True) is stand_in
    stand_in.retain_grad()


class Sink:
    """Notes what lands and returns `answer`, which autograd adds to the gradient of the parameter."""

    def __init__(self, answer: torch.Tensor | None = None):
        self.answer = answer
        self.landed: list[tuple[UnitTensor, torch.Tensor, object]] = []
        self.grad_modes: list[bool] = []
        self.before_host: list[UnitTensor] = []
        self.reads = 0

    def land(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, node: object) -> torch.Tensor | None:
        self.landed.append((tensor, gradient, node))
        self.grad_modes.append(torch.is_grad_enabled())
        return self.answer

    def before_host_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        self.before_host.append(tensor)


@pytest.fixture
def unit() -> OffloadUnit:
    model = nn.Linear(3, 3, bias=False)
    (unit,) = cut(model, [CutPoint("layer", model)]).units
    unit.bring_home(HostArena(torch.device("cpu")))
    return unit


def test_the_sum_of_all_uses_lands_once_with_the_node_of_the_parameter(unit: OffloadUnit):
    (tensor,), sink = unit.tensors, Sink()
    joined = joined_to_host(unit, tensor, torch.ones(3, 3), sink)
    (2 * joined + joined * 3).sum().backward()
    ((landed, gradient, node),) = sink.landed
    assert landed is tensor
    assert torch.equal(gradient, torch.full((3, 3), 5.0))
    assert node.variable is tensor.host
    assert node is joined.grad_fn.accumulates
    assert tensor.host.grad is None
    assert not sink.before_host


def test_what_the_sink_returns_goes_to_the_parameter(unit: OffloadUnit):
    (tensor,), sink = unit.tensors, Sink(torch.full((3, 3), 7.0))
    joined_to_host(unit, tensor, torch.ones(3, 3), sink).sum().backward()
    assert torch.equal(tensor.host.grad, sink.answer)
    assert sink.before_host == [tensor]


def test_a_sink_makes_no_graph_of_its_own(unit: OffloadUnit):
    (tensor,), sink = unit.tensors, Sink()
    loss = joined_to_host(unit, tensor, torch.ones(3, 3), sink).square().sum()
    loss.backward(create_graph=True)
    assert sink.grad_modes == [False]


def test_an_undefined_gradient_does_not_land(unit: OffloadUnit):
    class Nothing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, given):
            return given.clone()

        @staticmethod
        def backward(ctx, gradient):
            return None

    sink = Sink()
    Nothing.apply(joined_to_host(unit, unit.tensors[0], torch.ones(3, 3), sink)).sum().backward()
    assert not sink.landed


def test_a_share_sums_its_uses_for_the_parameter():
    parameter = nn.Parameter(torch.ones(3))
    share, gradients = share_of(parameter, parameter.detach()), []
    parameter.register_hook(gradients.append)
    (share * 2 + share).sum().backward()
    assert [gradient.tolist() for gradient in gradients] == [[3.0, 3.0, 3.0]]


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


@pytest.mark.sampled
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
