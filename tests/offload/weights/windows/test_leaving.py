"""What a forward returned is searched for tensors of slots, in containers and objects of any kind."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.weights.windows.leaving import copy_what_leaves

Pair = namedtuple("Pair", "first second")


@dataclass(frozen=True)
class Frozen:
    held: object


@dataclass(slots=True)
class Slotted:
    held: object


class OwnList(list):
    pass


class OwnDict(dict):
    pass


class OwnTuple(tuple):
    pass


class Private:
    """Its slot has another name than the source shows."""

    __slots__ = ("__held",)

    def __init__(self, held: object):
        self.__held = held

    @property
    def held(self) -> object:
        return self.__held


def tuple_with_attribute(tensor: torch.Tensor) -> OwnTuple:
    made = OwnTuple((1, tensor))
    made.other = tensor
    return made


HOLDERS = {
    "list": lambda tensor: [tensor],
    "dictionary": lambda tensor: OrderedDict(a={"b": (tensor,)}),
    "named tuple": lambda tensor: Pair(0, tensor),
    "frozen dataclass": Frozen,
    "dataclass of slots": Slotted,
    "nested": lambda tensor: {"out": [Frozen(SimpleNamespace(x=(1, Slotted(tensor))))]},
    "distribution": lambda tensor: torch.distributions.Independent(torch.distributions.Normal(tensor, 1.0), 1),
    "own list": lambda tensor: OwnList([1, tensor]),
    "own dictionary": lambda tensor: OwnDict(a=tensor),
    "own tuple": tuple_with_attribute,
    "set": lambda tensor: {1, tensor},
    "private slot": Private,
}


@pytest.fixture
def slots(streams: Streams) -> DeviceSlots:
    made = DeviceSlots(1, 64, streams)
    made.all[0].content = object()
    return made


def tensors_in(value: object) -> list[torch.Tensor]:
    """The tensors of four elements anywhere in `value`."""
    if isinstance(value, torch.Tensor):
        return [value] if value.numel() == 4 else []
    if isinstance(value, dict):
        return [tensor for item in value.values() for tensor in tensors_in(item)]
    if isinstance(value, (Slotted, Private)):
        return tensors_in(value.held)
    items = list(value) if isinstance(value, (list, tuple, set)) else []
    held = [*items, *(vars(value).values() if hasattr(value, "__dict__") else ())]
    return [tensor for each in held for tensor in tensors_in(each)]


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_leaves_becomes_a_copy_wherever_it_is(slots: DeviceSlots, hold) -> None:
    weight = slots.all[0].bytes[:16].view(torch.float32).fill_(1.0)
    result = hold(weight)
    found = copy_what_leaves(result, slots, lambda unit: True)
    assert type(found) is type(result)
    copies = tensors_in(found)
    assert copies
    weight.fill_(2.0)
    assert all((copy == 1).all() for copy in copies)


@pytest.mark.parametrize("hold", HOLDERS.values(), ids=HOLDERS)
def test_what_stays_is_the_same_object(slots: DeviceSlots, hold) -> None:
    for tensor, closing in ((torch.ones(4), True), (slots.all[0].bytes[:16].view(torch.float32).fill_(1.0), False)):
        result = hold(tensor)
        before = tensors_in(result)
        found = copy_what_leaves(result, slots, lambda unit, closing=closing: closing)
        assert found is result
        assert all(one is other for one, other in zip(tensors_in(found), before, strict=True))


def test_objects_that_refer_to_themselves_and_modules_are_left(slots: DeviceSlots) -> None:
    weight = slots.all[0].bytes[:16].view(torch.float32)
    module = nn.Linear(2, 2)
    module.held = weight
    result = SimpleNamespace(module=module, weight=weight)
    result.itself = result
    found = copy_what_leaves(result, slots, lambda unit: True)
    assert found is result
    assert found.weight is not weight
    assert module.held is weight


def test_objects_make_chains_and_circles_of_any_length(slots: DeviceSlots) -> None:
    weight = slots.all[0].bytes[:16].view(torch.float32)
    last = SimpleNamespace(weight=weight)
    first = last
    for number in range(3000):
        first = SimpleNamespace(after=first) if number % 2 else SimpleNamespace(after=[{"after": first}])
    last.after = [first]
    last.after.append(last.after)
    assert copy_what_leaves(first, slots, lambda unit: True) is first
    assert last.weight is not weight


def test_a_list_that_two_objects_hold_stays_one(slots: DeviceSlots) -> None:
    held = [slots.all[0].bytes[:16].view(torch.float32)]
    result = SimpleNamespace(one=held, other=Frozen(held))
    copy_what_leaves(result, slots, lambda unit: True)
    assert result.one is result.other.held is held
    assert slots.slot_of(held[0]) is None


def test_objects_are_not_asked_for_what_they_hold(slots: DeviceSlots) -> None:
    class Refuses:
        def __getattr__(self, name: str) -> object:
            raise AssertionError(name)

    gone = Refuses()
    result = SimpleNamespace(refuses=Refuses(), proxy=weakref.proxy(gone))
    del gone
    gc.collect()
    assert copy_what_leaves(result, slots, lambda unit: True) is result
