"""The forwards that are running, with the windows that each has opened."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch
from torch import nn

from offload.streams.registry import Stream
from offload.torch_private.tensor_parts import version_of
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.stand_in_class import data_was_taken


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
