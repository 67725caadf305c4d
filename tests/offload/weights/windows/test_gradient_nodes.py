"""The nodes of stand-ins: a gradient goes to the sink, with the node that accumulates into the parameter."""

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.gradient_nodes import joined_to_host, share_of


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
