"""The forwards that are running: the windows that each has opened, and what it returns."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.streams.registry import Stream
from offload.torch_private.tensor_parts import version_of
from offload.torch_private.torch_internals import tree_flatten, tree_unflatten
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.windows.stand_in import data_was_taken


class Scope:
    """The forward of `module`, which is running: the units whose windows it opened, and the copies that it got."""

    __slots__ = ("copies", "module", "units")

    def __init__(self, module: nn.Module):
        self.module = module
        self.units: list[OffloadUnit] = []
        self.copies: dict[UnitTensor, torch.Tensor] = {}

    def check_copies(self) -> None:
        """Raises RuntimeError where the forward has changed a copy."""
        for tensor, copy in self.copies.items():
            if version_of(copy) or data_was_taken(copy):
                raise RuntimeError(
                    f"{tensor.name} was changed in a forward while all device slots are in use, and the change would be"
                    " lost: give the mode more slots"
                )


class RunningForwards:
    """The scopes of one thread, from the outermost to the innermost, and the units whose windows they opened.

    `pack` is the innermost pack function that the windows have opened, and `compute` the stream for which they had
    their units fetched.
    """

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.units: set[OffloadUnit] = set()
        self.pack: Callable | None = None
        self.compute: Stream | None = None

    def end(self, scope: Scope) -> None:
        """Ends the forward of `scope`."""
        if self.scopes[-1] is scope:
            self.scopes.pop()
        else:
            self.scopes.remove(scope)
        if scope.units:
            self.units = {unit for other in self.scopes for unit in other.units}


class ThreadForwards(threading.local):
    """`running`: the forwards of the thread that asks. Microbatches side by side have each their own.

    The garbage collector closes what a thread leaves open, in any thread: keep the object, and do not ask again.
    """

    def __init__(self) -> None:
        self.running = RunningForwards()


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
