"""Reads of tensors by attribute are noticed; iteration, copies and files see plain dictionaries."""

import copy
import pickle
from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.torch_private.torch_internals import tree_leaves
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.held_tensors import (
    HeldTensors,
    OpenTensors,
    RunningForwards,
    Scope,
    ThreadForwards,
    copy_returned,
    end_watch,
    watch_reads,
)
from tests.offload.helpers.units import tensor_of


@pytest.fixture
def layer() -> nn.BatchNorm1d:
    return nn.BatchNorm1d(3)


def watched(layer: nn.Module, on_read) -> list[nn.Module]:
    return watch_reads(cut(layer, [CutPoint("layer", layer)]).units, on_read)[0]


def test_a_read_by_attribute_is_noticed_and_may_be_answered(layer: nn.BatchNorm1d):
    seen: list[str] = []
    other = torch.ones(3)

    def on_read(unit: OffloadUnit, tensor: UnitTensor) -> torch.Tensor | None:
        seen.append(tensor.name)
        return other if tensor.name == "bias" else None

    weight = layer.weight
    watched(layer, on_read)
    assert layer.weight is weight
    assert layer.bias is other
    assert layer.running_mean is layer._buffers.get("running_mean")
    assert seen == ["weight", "bias", "running_mean"]


def test_iteration_and_new_names_are_not_reads(layer: nn.BatchNorm1d):
    watched(layer, lambda unit, tensor: pytest.fail(f"{tensor.name} was read"))
    assert len(list(layer.parameters())) == 2
    layer.load_state_dict(layer.state_dict())
    layer.more = nn.Parameter(torch.zeros(3))
    assert layer.more.sum() == 0


def test_copies_and_files_have_plain_dictionaries(layer: nn.BatchNorm1d):
    watched(layer, lambda unit, tensor: None)
    twin = copy.deepcopy(layer)
    loaded = pickle.loads(pickle.dumps(layer))
    for other in (twin, loaded):
        assert type(other._parameters) is dict
        assert type(other._buffers) is dict
        assert torch.equal(other.weight, layer.weight)
        assert other.weight is not layer.weight


def test_the_end_of_the_watch_keeps_what_modules_hold(layer: nn.BatchNorm1d):
    names, tensors = list(layer.state_dict()), list(layer.parameters())
    modules = watched(layer, lambda unit, tensor: pytest.fail("read after the end"))
    assert modules == [layer]
    assert isinstance(layer._parameters, HeldTensors)
    end_watch(modules)
    assert type(layer._parameters) is dict
    assert list(layer.state_dict()) == names
    assert all(one is other for one, other in zip(layer.parameters(), tensors, strict=True))
    assert layer.weight is tensors[0]


def test_a_dictionary_of_one_unit_is_returned_and_tells_nobody_while_its_window_is_open(layer: nn.BatchNorm1d):
    seen: list[str] = []
    units = cut(layer, [CutPoint("layer", layer)]).units
    _, held = watch_reads(units, lambda unit, tensor: seen.append(tensor.name))
    assert [each is layer._parameters or each is layer._buffers for each in held[units[0]]] == [True, True]
    for each in held[units[0]]:
        each.__class__ = OpenTensors
    assert layer.weight is not None
    assert not seen
    end_watch([layer])
    assert type(layer._parameters) is type(layer._buffers) is dict


def test_a_dictionary_of_two_units_is_none_of_either():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].bias = model[0].bias
    units = cut(model, [CutPoint("first", model[0]), CutPoint("second", model[1])]).units
    _, held = watch_reads(units, lambda unit, tensor: None)
    assert [len(held[unit]) for unit in units] == [1, 0]
    end_watch(list(model))


def test_a_changed_copy_is_refused():
    module = nn.Linear(2, 2)
    scope, copy = Scope(module), module.weight.detach().clone()
    scope.copies[tensor_of(module.weight)] = copy
    scope.check_copies()
    copy.add_(1)
    with pytest.raises(RuntimeError, match="was changed in a forward while all device slots are in use"):
        scope.check_copies()


def test_scopes_belong_to_a_thread():
    threads = ThreadForwards()
    threads.running.scopes.append(Scope(nn.Identity()))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: threads.running.scopes).result(300) == []


def test_a_unit_is_open_until_the_last_scope_that_opened_it_ends():
    running, unit = RunningForwards(), OffloadUnit("unit", 0)
    outer, inner = Scope(nn.Identity()), Scope(nn.Identity())
    for scope in (outer, inner):
        running.scopes.append(scope)
        scope.units.append(unit)
        running.units.add(unit)
    running.end(inner)
    assert running.units == {unit}
    running.end(outer)
    assert not running.units
    assert outer.units == [unit]


Pair = namedtuple("Pair", "first second")
HOLDERS = {
    "tensor": lambda tensor: tensor,
    "list": lambda tensor: [tensor],
    "dictionary": lambda tensor: OrderedDict(a={"b": (tensor,)}),
    "named tuple": lambda tensor: Pair(0, tensor),
}


@pytest.fixture
def slots(streams: Streams) -> DeviceSlots:
    made = DeviceSlots(1, 64, streams)
    made.all[0].content = object()
    return made


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_leaves_becomes_a_copy(slots: DeviceSlots, hold) -> None:
    weight = slots.all[0].bytes[:16].view(torch.float32).fill_(1.0)
    result = hold(weight)
    found = copy_returned(result, slots.slot_of, lambda unit: True)
    assert type(found) is type(result)
    weight.fill_(2.0)
    assert [each.tolist() for each in tree_leaves(found) if isinstance(each, torch.Tensor)] == [[1.0] * 4]


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_stays_is_the_same_object(slots: DeviceSlots, hold) -> None:
    for tensor, closing in ((torch.ones(4), True), (slots.all[0].bytes[:16].view(torch.float32).fill_(1.0), False)):
        result = hold(tensor)
        assert copy_returned(result, slots.slot_of, lambda unit, closing=closing: closing) is result


def test_gradients_flow_through_a_copy(slots: DeviceSlots) -> None:
    weight = slots.all[0].bytes[:16].view(torch.float32).fill_(1.0).requires_grad_()
    (copy,) = copy_returned((weight,), slots.slot_of, lambda unit: True)
    copy.sum().backward()
    assert weight.grad.tolist() == [1.0] * 4


def test_a_tensor_in_an_attribute_is_refused(slots: DeviceSlots) -> None:
    weight = slots.all[0].bytes[:16].view(torch.float32)
    normal = torch.distributions.Normal(weight, 1.0, validate_args=False)
    with pytest.raises(RuntimeError, match="a Normal whose attribute loc is a weight"):
        copy_returned([normal], slots.slot_of, lambda unit: True)
    loc = torch.distributions.Normal(weight.clone(), 1.0, validate_args=False)
    assert copy_returned(loc, slots.slot_of, lambda unit: True) is loc
