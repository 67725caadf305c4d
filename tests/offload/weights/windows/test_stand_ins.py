"""Stand-ins: what modules hold inside a window, and the gradients and buffers that come out of it."""

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.memory.host_memory import HostArena
from offload.streams import registry
from offload.torch_private.module_contexts import running
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.stand_in import StandIn, StandIns
from offload.weights.windows.stand_ins import ResidentShares, drop_stand_ins, install_stand_ins, remove_stand_ins
from tests.offload.helpers.units import data_in


class Net(nn.Module):
    """A layer, statistics that forward updates, and a buffer that forward replaces or leaves alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("count", torch.zeros(()))
        self.register_buffer("mask", torch.ones(300, 300, dtype=torch.bool))
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
def stand_ins(unit: OffloadUnit) -> list[StandIn]:
    return StandIns([unit])[unit]


@pytest.fixture
def slot(unit: OffloadUnit) -> Iterator[DeviceSlot]:
    """A slot that has the unit's bytes."""
    streams = registry.acquire("cpu")
    slot = DeviceSlot(0, torch.empty(unit.nbytes, dtype=torch.uint8), streams)
    slot.bytes.copy_(unit.weights.bytes)
    yield slot
    registry.release(streams)


class Sink:
    """Notes what lands, and gives it to autograd; `before_host` has what was announced before that."""

    def __init__(self):
        self.landed: list[str] = []
        self.before_host: list[str] = []

    def land(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor, node: object) -> torch.Tensor:
        self.landed.append(tensor.name)
        return gradient

    def before_host_gradient(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        self.before_host.append(tensor.name)


@pytest.fixture
def sink() -> Sink:
    return Sink()


def test_modules_hold_views_of_the_slot_until_stand_ins_are_removed(
    net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    host = dict(net.named_parameters()) | dict(net.named_buffers())
    install_stand_ins(unit, stand_ins, slot, sink, ())
    inside = dict(net.named_parameters()) | dict(net.named_buffers())
    for name, tensor in inside.items():
        is_view = tensor.untyped_storage().data_ptr() == slot.bytes.untyped_storage().data_ptr()
        # Of buffers that may change, each window has a copy.
        assert is_view == (isinstance(tensor, nn.Parameter) or name == "mask"), name
        assert torch.equal(tensor, host[name]), name
    assert isinstance(net.layer.weight, nn.Parameter)
    remove_stand_ins(stand_ins, slot)
    outside = dict(net.named_parameters()) | dict(net.named_buffers())
    assert all(outside[name] is tensor for name, tensor in host.items())


def test_a_parameter_has_one_stand_in_which_serves_the_next_step_too(
    net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    hooked = []
    net.layer.weight.register_hook(hooked.append)
    install_stand_ins(unit, stand_ins, slot, sink, ())
    first = net.layer.weight
    loss = net(torch.randn(4, 3)).square().sum()
    remove_stand_ins(stand_ins, slot)
    install_stand_ins(unit, stand_ins, slot, sink, ())
    assert net.layer.weight is first
    loss.backward()
    assert sorted(sink.landed) == ["layer.bias", "layer.weight", "norm.bias", "norm.weight"]
    assert sorted(sink.before_host) == sorted(sink.landed)
    assert len(hooked) == 1
    remove_stand_ins(stand_ins, slot)
    drop_stand_ins(stand_ins)
    net.layer.weight.tag = "of the host"
    install_stand_ins(unit, stand_ins, slot, sink, ())
    assert net.layer.weight is first
    assert net.layer.weight.tag == "of the host"
    sink.landed.clear()
    net(torch.randn(4, 3)).square().sum().backward()
    assert sorted(sink.landed) == ["layer.bias", "layer.weight", "norm.bias", "norm.weight"]


@pytest.mark.parametrize("done", ["changed", "replaced"])
def test_a_stand_in_that_is_no_longer_as_it_was_made_serves_no_other_step(
    done: str, net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    install_stand_ins(unit, stand_ins, slot, sink, ())
    first = net.layer.weight
    if done == "changed":
        first.mul_(2)
    remove_stand_ins(stand_ins, slot)
    drop_stand_ins(stand_ins)
    if done == "replaced":
        tensor = next(tensor for tensor in unit.tensors if tensor.host is net.layer.weight)
        tensor.host = net.layer.weight = nn.Parameter(torch.ones(3, 3))
    install_stand_ins(unit, stand_ins, slot, sink, ())
    assert net.layer.weight is not first
    assert net.norm.weight.grad_fn is not None


def test_backward_without_its_mode_is_refused(net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot):
    sink = Sink()
    install_stand_ins(unit, stand_ins, slot, sink, ())
    loss = net(torch.randn(4, 3)).sum()
    # Nothing but its owner keeps the sink alive: a stand-in may outlive the step.
    del sink
    with pytest.raises(RuntimeError, match="backward of a forward whose offload mode is gone"):
        loss.backward()


def test_frozen_parameters_have_stand_ins_without_gradients(
    net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    net.layer.requires_grad_(False)
    install_stand_ins(unit, stand_ins, slot, sink, ())
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
    training: bool,
    replaces: bool,
    changed: set[str],
    net: Net,
    unit: OffloadUnit,
    stand_ins: list[StandIn],
    slot: DeviceSlot,
    sink: Sink,
):
    net.train(training)
    net.replaces = replaces
    install_stand_ins(unit, stand_ins, slot, sink, ())
    with torch.no_grad():
        net(torch.randn(4, 3))
    found = remove_stand_ins(stand_ins, slot)
    assert {each.tensor.name for each in found} == changed
    if replaces:
        assert found[0].device.item() == 1
        assert data_in(found[0].tensor, slot.bytes).item() == 1


def test_what_autograd_saves_of_a_buffer_stays_as_the_window_leaves_it(
    net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    for count in (1, 2, 3):
        install_stand_ins(unit, stand_ins, slot, sink, ())
        net.count += 1
        held = net.count
        assert "count" in [each.tensor.name for each in remove_stand_ins(stand_ins, slot)]
        (counted,) = (each for each in stand_ins if each.tensor.name == "count")
        assert data_in(counted.tensor, slot.bytes).item() == held.item() == count
    assert counted.state[0] == 3


def test_a_large_buffer_counts_the_changes_that_forwards_make(
    net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    (mask,) = (each for each in stand_ins if each.tensor.name == "mask")
    install_stand_ins(unit, stand_ins, slot, sink, ())
    net.mask.logical_not_().logical_not_()
    inside = mask.state[0]
    remove_stand_ins(stand_ins, slot)
    assert mask.state[0] == inside == 2
    install_stand_ins(unit, stand_ins, slot, sink, ())
    remove_stand_ins(stand_ins, slot)
    drop_stand_ins(stand_ins)
    assert mask.state[0] == 2


def test_microbatches_side_by_side_have_each_a_share_of_a_stand_in(
    net: Net, unit: OffloadUnit, stand_ins: list[StandIn], slot: DeviceSlot, sink: Sink
):
    shares = []
    for microbatch in (0, 1, 0):
        with running(microbatch):
            install_stand_ins(unit, stand_ins, slot, sink, ())
        shares.append(net.layer.weight)
        remove_stand_ins(stand_ins, slot)
    assert shares[0] is shares[2]
    assert shares[0] is not shares[1]
    assert isinstance(shares[1], nn.Parameter)
    # 1e8 swallows a 1 that is added to it alone: the sum of each microbatch comes first.
    (1e8 * shares[0] - 1e8 * shares[0] + shares[1] + shares[1]).sum().backward()
    assert sink.landed == ["layer.weight"]
    assert torch.equal(net.layer.weight.grad, torch.full((3, 3), 2.0))
    drop_stand_ins(stand_ins)
    with running(0):
        install_stand_ins(unit, stand_ins, slot, sink, ())
    assert net.layer.weight is not shares[0]


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    return model


def test_uses_of_a_microbatch_are_summed_before_those_of_others(model: nn.Module):
    shares = ResidentShares(cut(model, []).resident)
    weight, uses = model[0].weight, {}
    for place in (0, 1):
        # 1e8 swallows a 1 that is added to it alone.
        for microbatch, factor in enumerate((1e8 * (-1) ** place, 1.0)):
            with shares.turn(microbatch):
                uses[place, microbatch] = factor * model[place].weight.sum()
    sum(uses.values()).backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_a_share_is_the_same_in_all_turns_of_its_microbatch(model: nn.Module):
    shares = ResidentShares(cut(model, []).resident)
    held = dict(model.named_parameters(remove_duplicate=False))
    seen = []
    for microbatch in (0, 1, 0):
        with shares.turn(microbatch):
            share = model[0].weight
            assert model[1].weight is share
            assert isinstance(share, nn.Parameter)
            assert share.data_ptr() == held["0.weight"].data_ptr()
            # What does not train is used as it is.
            assert model[2].weight is held["2.weight"]
            assert model[2].bias is not held["2.bias"]
            seen.append(share)
        assert all(
            dict(model.named_parameters(remove_duplicate=False))[name] is tensor for name, tensor in held.items()
        )
    assert seen[0] is seen[2]
    assert seen[0] is not seen[1]
    shares.drop()
    with shares.turn(0):
        assert model[0].weight is not seen[0]


def test_changes_to_a_share_are_changes_to_its_parameter(model: nn.Module):
    shares = ResidentShares(cut(model, []).resident)
    weight = model[0].weight
    with shares.turn(0), torch.no_grad():
        model[0].weight.fill_(3.0)
    assert (weight == 3).all()
    assert weight._version > 0
    with shares.turn(0):
        model[0].weight.data = torch.full((2, 2), 4.0)
    assert model[0].weight is weight
    assert (weight == 4).all()
    new = nn.Parameter(torch.ones(2, 2))
    with shares.turn(1):
        model[0].weight = new
    assert model[0].weight is new
    assert model[1].weight is weight
