"""Tensors of slots are found in what a forward returned, in the containers that torch takes apart."""

from __future__ import annotations

from collections import OrderedDict, namedtuple

import pytest
import torch

from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.torch_private.torch_internals import tree_leaves
from offload.weights.windows.returned_tensors import copy_returned

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
