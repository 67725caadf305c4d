"""The forwards that are running, with what each has opened."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.weights.stand_in_class import data_was_taken
from offload.weights.unit_tensor import UnitTensor
from offload.weights.units import OffloadUnit


@dataclass(eq=False)
class Scope:
    """The forward of `module`, which is running: the units whose windows it opened, and the copies that it got.

    `before` has the values that copies of buffers had.
    """

    module: nn.Module
    units: list[OffloadUnit] = field(default_factory=list)
    copies: dict[UnitTensor, torch.Tensor] = field(default_factory=dict)
    before: dict[UnitTensor, torch.Tensor] = field(default_factory=dict)

    def check_copies(self) -> None:
        """Raises RuntimeError where the forward has changed a copy."""
        for tensor, copy in self.copies.items():
            # Kernels that update running statistics raise no version counter, and neither do writes through `.data`.
            if tensor in self.before:
                changed = not torch.equal(copy, self.before[tensor])
            else:
                changed = copy._version > 0 or (data_was_taken(copy) and not tensor.layout.is_compound)
            if changed:
                raise RuntimeError(
                    f"{tensor.name} was changed in a forward while all device slots are in use, and the change would be"
                    " lost: give the mode more slots"
                )


class RunningForwards(threading.local):
    """The scopes of a thread, from the outermost to the innermost. Microbatches side by side have each their own."""

    def __init__(self) -> None:
        self.scopes: list[Scope] = []
