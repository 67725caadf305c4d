"""Tensors of a slot that a forward returns: they become copies, which need no slot."""

from __future__ import annotations

from collections.abc import Callable

import torch

from offload.memory.device_slots import DeviceSlot
from offload.torch_private.torch_internals import tree_flatten, tree_unflatten
from offload.weights.units.unit import OffloadUnit


def copy_returned(
    result: object, slot_of: Callable[[torch.Tensor], DeviceSlot | None], closing: Callable[[OffloadUnit], bool]
) -> object:
    """Returns what a forward returned, tensors in a slot of a unit that is `closing` replaced by copies.

    A module may return its own parameter or buffer, or a view of one (a table of positions, say): as it is, or in
    containers that torch takes apart (`torch.utils._pytree`: lists, tuples, dictionaries, outputs of transformers). A
    container is made anew where something in it is copied. Gradients flow through the copies. Raises RuntimeError for
    such a tensor in an attribute of another object.
    """

    def needs_copy(tensor: object) -> bool:
        if not isinstance(tensor, torch.Tensor):
            return False
        slot = slot_of(tensor)
        return slot is not None and slot.content is not None and closing(slot.content)

    if isinstance(result, torch.Tensor):
        return result.clone() if needs_copy(result) else result
    found, structure = tree_flatten(result)
    for each in found:
        for name, held in getattr(each, "__dict__", {}).items():
            if needs_copy(held):
                raise RuntimeError(
                    f"a forward returns a {type(each).__name__} whose attribute {name} is a weight or buffer that"
                    " streams, which is soon overwritten: return it in a tuple or a dictionary, or a clone of it"
                )
    if not any(map(needs_copy, found)):
        return result
    return tree_unflatten([each.clone() if needs_copy(each) else each for each in found], structure)
