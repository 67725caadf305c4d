"""The forwards that are running, with what each has opened."""

from __future__ import annotations

import operator
import threading

import torch
from torch import nn

from offload.torch_private.tensor_parts import parts, version_of
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.stand_in_class import data_was_taken


class Scope:
    """The forward of `module`, which is running: the units whose windows it opened, and the copies that it got.

    `before` has the values that copies of buffers had, and `consisted` the parts and the version of those of parameters
    that consist of several tensors.
    """

    def __init__(self, module: nn.Module):
        self.module = module
        self.units: list[OffloadUnit] = []
        self.copies: dict[UnitTensor, torch.Tensor] = {}
        self.before: dict[UnitTensor, torch.Tensor] = {}
        self.consisted: dict[UnitTensor, tuple[list[torch.Tensor], int]] = {}

    def keep(self, tensor: UnitTensor, copy: torch.Tensor) -> None:
        """Keeps the copy that the forward gets in place of `tensor`."""
        self.copies[tensor] = copy
        if tensor.is_buffer:
            self.before[tensor] = copy.clone()
        elif tensor.layout.is_compound:
            self.consisted[tensor] = parts(copy), version_of(copy)

    def check_copies(self) -> None:
        """Raises RuntimeError where the forward has changed a copy."""
        for tensor, copy in self.copies.items():
            # Kernels that update running statistics raise no version counter, and neither do writes through `.data`.
            if tensor in self.before:
                changed = not torch.equal(copy, self.before[tensor])
            elif tensor in self.consisted:
                # Code writes to the parts, or gives it others. Quantised weights are read through `.data`.
                before, version = self.consisted[tensor]
                changed = version_of(copy) != version or any(map(operator.is_not, parts(copy), before))
            else:
                changed = copy._version > 0 or data_was_taken(copy)
            if changed:
                raise RuntimeError(
                    f"{tensor.name} was changed in a forward while all device slots are in use, and the change would be"
                    " lost: give the mode more slots"
                )


class RunningForwards:
    """The scopes of one thread, from the outermost to the innermost, and the units whose windows they opened."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.units: set[OffloadUnit] = set()

    def opened(self, unit: OffloadUnit, scope: Scope) -> None:
        """Notes a window on `unit` that `scope` has opened."""
        scope.units.append(unit)
        self.units.add(unit)

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
