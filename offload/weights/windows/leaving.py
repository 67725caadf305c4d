"""Tensors of a slot that leave a window in what a forward returns: they become copies, which need no slot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType

import torch
from torch import nn

from offload.runtime.memory.device_slots import DeviceSlots
from offload.runtime.torch_internals import tree_flatten, tree_unflatten
from offload.weights.units.unit import OffloadUnit
from offload.weights.windows.strided_copies import copied_with_strides


def copy_what_leaves(result: object, slots: DeviceSlots, closing: Callable[[OffloadUnit], bool]) -> object:
    """Returns what a forward returned, tensors in a slot of a unit that is `closing` replaced by copies.

    A module may return its own parameter or buffer, or a view of one (a table of positions, say): as it is, in nested
    containers, or in attributes of objects (a dataclass, a distribution of torch). Containers are made anew where
    something in them leaves; objects stay the same, and their attributes are replaced. Gradients flow through the
    copies.
    """

    def leaves(tensor: torch.Tensor) -> bool:
        slot = slots.slot_of(tensor)
        return slot is not None and slot.content is not None and closing(slot.content)

    if isinstance(result, torch.Tensor):
        return copied_with_strides(result) if leaves(result) else result
    seen: set[int] = set()

    def without(value: object) -> object:
        if isinstance(value, torch.Tensor):
            return copied_with_strides(value) if leaves(value) else value
        if value is None or isinstance(value, (str, bytes, int, float, nn.Module, ModuleType)) or id(value) in seen:
            return value
        parts, structure = tree_flatten(value)
        if len(parts) != 1 or parts[0] is not value:
            copies = [without(part) for part in parts]
            changed = any(copy is not part for copy, part in zip(copies, parts, strict=True))
            return tree_unflatten(copies, structure) if changed else value
        # An object of no kind that torch takes apart. It may refer to itself.
        seen.add(id(value))
        for put, name, part in _held_by(value):
            copy = without(part)
            if copy is not part:
                put(value, name, copy)
        return value

    return without(result)


def _held_by(value: object) -> Iterator[tuple[Callable[[object, object, object], None], object, object]]:
    """Yields what an object holds, by item or attribute, with the function that puts something else there."""
    if isinstance(value, dict):
        yield from ((dict.__setitem__, name, part) for name, part in list(value.items()))
    if isinstance(value, list):
        yield from ((list.__setitem__, index, part) for index, part in enumerate(value))
    if isinstance(attributes := getattr(value, "__dict__", None), dict):
        yield from ((_put_attribute, name, part) for name, part in list(attributes.items()))
    for kind in type(value).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if name not in ("__dict__", "__weakref__") and hasattr(value, name):
                yield object.__setattr__, name, getattr(value, name)


def _put_attribute(value: object, name: str, copy: object) -> None:
    # Not by assignment: a dataclass may be frozen, and a class may have its own way to set attributes.
    value.__dict__[name] = copy
