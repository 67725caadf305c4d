"""A trial of microbatches side by side: what tells them apart, and what it leaves behind, which is nothing."""

import random
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.microbatches.trial import compute_alike
from offload.torch_private.threads import SideBySideError


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm, self.calls = nn.Linear(2, 2), nn.BatchNorm1d(2), 0

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.norm(self.layer(rows)).square().sum()


def alike(net: Net, losses: list[Callable], side_by_side: Callable | None = None) -> bool:
    def versions() -> list[int]:
        return [parameter._version for parameter in net.parameters()]

    together = side_by_side or (lambda losses: [loss() for loss in losses])
    return compute_alike(losses, together, net, torch.device("cpu"), versions)


def test_the_same_numbers_are_alike_and_nothing_is_left():
    net = Net()
    state = {name: value.clone() for name, value in net.state_dict().items()}
    buffers, drawn = dict(net.named_buffers()), (torch.get_rng_state(), random.getstate())

    def loss() -> torch.Tensor:
        return net(torch.randn(4, 2)) * random.random()

    assert alike(net, [loss, loss])
    assert net.calls == 0
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in state.items())
    assert all(buffer is buffers[name] for name, buffer in net.named_buffers())
    assert torch.equal(torch.get_rng_state(), drawn[0])
    assert random.getstate() == drawn[1]


def test_other_numbers_other_trained_parameters_and_refusals_are_not_alike():
    net, rows = Net(), torch.ones(3, 2)
    assert not alike(net, [lambda: net(rows)], lambda losses: [2 * loss() for loss in losses])
    assert not alike(net, [lambda: net(rows)], lambda losses: [loss().detach().requires_grad_() for loss in losses])

    def refuse(losses: list[Callable]) -> list:
        net.layer.weight = nn.Parameter(torch.zeros(2, 2))
        net.layer.bias.requires_grad_(False)
        raise SideBySideError("a weight is replaced")

    weight = net.layer.weight
    assert not alike(net, [lambda: net(rows)], refuse)
    assert net.layer.weight is weight
    assert net.layer.bias.requires_grad


def test_a_changed_weight_is_refused_and_other_errors_are_raised():
    net, rows = Net(), torch.ones(3, 2)

    def changing() -> torch.Tensor:
        with torch.no_grad():
            net.layer.weight.mul_(2)
        return net(rows)

    with pytest.raises(RuntimeError, match="changes, freezes or replaces a weight") as refused:
        alike(net, [changing])
    assert "\n" not in str(refused.value)

    def failing() -> torch.Tensor:
        net.layer.extra = 1
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        alike(net, [failing])
    assert not hasattr(net.layer, "extra")


def test_what_forwards_register_goes():
    class Registering(Net):
        def forward(self, rows: torch.Tensor) -> torch.Tensor:
            if not hasattr(self, "table"):
                self.register_buffer("table", rows.sum(0).detach())
                self.register_parameter("scale", nn.Parameter(torch.ones(()), requires_grad=False))
            return super().forward(rows) * self.scale + self.table.sum()

    net, rows = Registering(), torch.ones(3, 2)
    net.norm = nn.BatchNorm1d(2)
    state = {name: value.clone() for name, value in net.state_dict().items()}
    assert alike(net, [lambda: net(rows)])
    assert {name: value.tolist() for name, value in net.state_dict().items()} == {
        name: value.tolist() for name, value in state.items()
    }
