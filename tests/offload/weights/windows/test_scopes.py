"""A scope refuses changes to its copies; tensors of slots that a forward returns become copies."""

from collections import OrderedDict, namedtuple
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.torch_private.torch_internals import tree_leaves
from offload.weights.units.unit import OffloadUnit
from offload.weights.windows.scopes import RunningForwards, Scope, ThreadForwards, copy_returned
from tests.offload.helpers.units import tensor_of


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
