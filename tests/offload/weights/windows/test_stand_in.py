"""A stand-in has the class of its parameter, counts its changes, and refuses what only a leaf can do."""

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.memory.host_memory import HostArena
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
    stand_in.note_installed()
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
