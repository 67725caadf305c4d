"""Stand-ins: what modules hold inside a window, and the gradients and buffers that come out of it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.runtime import registry
from offload.runtime.device_slots import DeviceSlot
from offload.runtime.host_memory import HostArena
from offload.weights.partition import CutPoint, cut
from offload.weights.stand_ins import drop_stand_ins, install_stand_ins, remove_stand_ins
from offload.weights.units import OffloadUnit


class Net(nn.Module):
    """A layer, statistics that forward updates, and a buffer that forward replaces or leaves alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.replaces = False

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.replaces:
            self.count = self.count + 1
        return self.norm(self.layer(inputs))


@pytest.fixture
def net() -> Net:
    torch.manual_seed(0)
    return Net()


@pytest.fixture
def unit(net: Net) -> OffloadUnit:
    (unit,) = cut(net, [CutPoint("net", net)]).units
    unit.bring_home(HostArena(torch.device("cpu")))
    return unit


@pytest.fixture
def slot(unit: OffloadUnit) -> Iterator[DeviceSlot]:
    """A slot that has the unit's bytes."""
    streams = registry.acquire("cpu")
    slot = DeviceSlot(0, unit.nbytes, streams)
    slot.bytes.copy_(unit.weights.bytes)
    yield slot
    registry.release(streams)


def nothing_lands(*_: object) -> None:
    pytest.fail("a gradient landed")


def test_modules_hold_views_of_the_slot_until_stand_ins_are_removed(net: Net, unit: OffloadUnit, slot: DeviceSlot):
    host = dict(net.named_parameters()) | dict(net.named_buffers())
    install_stand_ins(unit, slot, nothing_lands)
    inside = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, tensor in inside.items():
        assert tensor.untyped_storage().data_ptr() == slot.bytes.untyped_storage().data_ptr(), name
        assert torch.equal(tensor, host[name]), name
    assert isinstance(net.layer.weight, nn.Parameter)
    remove_stand_ins(unit)
    outside = dict(net.named_parameters()) | dict(net.named_buffers())
    assert all(outside[name] is tensor for name, tensor in host.items())


def test_a_parameter_has_one_stand_in_until_stand_ins_are_dropped(net: Net, unit: OffloadUnit, slot: DeviceSlot):
    landed, hooked = [], []
    net.layer.weight.register_hook(hooked.append)
    install_stand_ins(unit, slot, lambda unit, tensor, gradient, node: landed.append((tensor.name, node)) or gradient)
    first = net.layer.weight
    loss = net(torch.randn(4, 3)).square().sum()
    remove_stand_ins(unit)
    install_stand_ins(unit, slot, nothing_lands)
    assert net.layer.weight is first
    loss.backward()
    assert sorted(name for name, _ in landed) == ["layer.bias", "layer.weight", "norm.bias", "norm.weight"]
    assert len(hooked) == 1
    remove_stand_ins(unit)
    drop_stand_ins(unit)
    install_stand_ins(unit, slot, nothing_lands)
    assert net.layer.weight is not first


def test_frozen_parameters_have_stand_ins_without_gradients(net: Net, unit: OffloadUnit, slot: DeviceSlot):
    net.layer.requires_grad_(False)
    install_stand_ins(unit, slot, nothing_lands)
    assert not net.layer.weight.requires_grad
    assert net.norm.weight.requires_grad


@pytest.mark.parametrize(
    ("training", "replaces", "changed"),
    [
        (True, False, {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "count"}),
        (False, False, set()),
        (False, True, {"count"}),
    ],
)
def test_changed_buffers_are_named_as_the_window_closes(
    training: bool, replaces: bool, changed: set[str], net: Net, unit: OffloadUnit, slot: DeviceSlot
):
    net.train(training)
    net.replaces = replaces
    install_stand_ins(unit, slot, nothing_lands)
    with torch.no_grad():
        net(torch.randn(4, 3))
    found = remove_stand_ins(unit)
    assert {tensor.name for tensor in found} == changed
    if replaces:
        assert found[0].device.item() == 1
        assert found[0].view_of(slot.bytes).item() == 1
