"""Tensors of a slot that leave a window in what a forward returns: they become copies, which need no slot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from types import MemberDescriptorType, ModuleType

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.torch_private.torch_internals import tree_flatten, tree_unflatten
from offload.weights.units.unit import OffloadUnit
from offload.weights.windows.strided_copies import copied_with_strides

_WITHOUT_TENSORS = (str, bytes, int, float, nn.Module, ModuleType)
_SETS = (set, frozenset)


def copy_what_leaves(result: object, slots: DeviceSlots, closing: Callable[[OffloadUnit], bool]) -> object:
    """Returns what a forward returned, tensors in a slot of a unit that is `closing` replaced by copies.

    A module may return its own parameter or buffer, or a view of one (a table of positions, say): as it is, in nested
    containers, or in attributes of objects (a dataclass, a distribution of torch). Containers are made anew where
    something in them leaves. Objects stay the same, and their attributes are replaced; so are the items of lists and
    dictionaries that objects hold. Gradients flow through the copies.
    """

    def leaves(tensor: torch.Tensor) -> bool:
        slot = slots.slot_of(tensor)
        return slot is not None and slot.content is not None and closing(slot.content)

    if isinstance(result, torch.Tensor):
        return copied_with_strides(result) if leaves(result) else result
    # By number, for objects may be equal. They are kept: the number of one that is gone may be that of another.
    seen: dict[int, object] = {}
    waiting: list[object] = []

    def visit_later(value: object) -> None:
        if id(value) not in seen:
            seen[id(value)] = value
            waiting.append(value)

    def without(value: object) -> object:
        # Not `isinstance`, which asks objects that stand for others, and fails where these are gone.
        kind = type(value)
        if issubclass(kind, torch.Tensor):
            return copied_with_strides(value) if leaves(value) else value
        if value is None or issubclass(kind, _WITHOUT_TENSORS):
            return value
        parts, structure = tree_flatten(value)
        if len(parts) != 1 or parts[0] is not value:
            return rebuilt(value, parts, lambda copies: tree_unflatten(copies, structure))
        # Of no kind that torch takes apart.
        if kind in _SETS:
            return rebuilt(value, list(value), kind)
        if issubclass(kind, tuple):
            value = rebuilt(value, list(tuple.__iter__(value)), functools.partial(_tuple_like, value))
        visit_later(value)
        return value

    def rebuilt(value: object, parts: list[object], build: Callable[[list[object]], object]) -> object:
        copies = [without(part) for part in parts]
        return build(copies) if any(copy is not part for copy, part in zip(copies, parts, strict=True)) else value

    result = without(result)
    # Objects wait for their turn, because they may refer to themselves and make chains of any length.
    while waiting:
        for put, holder, name, part in _held_by(waiting.pop()):
            if type(part) in (list, dict):
                visit_later(part)
            elif (copy := without(part)) is not part:
                put(holder, name, copy)
    return result


def _tuple_like(value: tuple, items: list[object]) -> tuple:
    made = tuple.__new__(type(value), items)
    if hasattr(made, "__dict__"):
        made.__dict__.update(value.__dict__)
    return made


def _held_by(value: object) -> Iterator[tuple[Callable[[object, object, object], None], object, object, object]]:
    """Yields what an object holds as items and attributes: put, holder, name, part.

    `put(holder, name, other)` puts another part there. No method of the object's own class runs: it may compute, and
    that of a frozen dataclass refuses.
    """
    kind = type(value)
    if issubclass(kind, dict):
        yield from ((dict.__setitem__, value, name, part) for name, part in list(dict.items(value)))
    if issubclass(kind, list):
        yield from ((list.__setitem__, value, index, part) for index, part in enumerate(list.__iter__(value)))
    try:
        attributes = object.__getattribute__(value, "__dict__")
    except AttributeError:
        attributes = None
    if isinstance(attributes, dict):
        yield from ((dict.__setitem__, attributes, name, part) for name, part in list(attributes.items()))
    # The members of classes that are not Python's cannot be written.
    for base in [base for base in kind.__mro__ if "__slots__" in base.__dict__]:
        for slot in [slot for slot in base.__dict__.values() if isinstance(slot, MemberDescriptorType)]:
            try:
                part = slot.__get__(value)
            except AttributeError:
                continue
            yield MemberDescriptorType.__set__, slot, value, part
