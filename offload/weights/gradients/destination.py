"""Where gradients go that have landed, if not home one by one. The core has no other place: `HOME`."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from offload.weights.gradients.updates import NO_UPDATES, Updates
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor


class Destination:
    """Takes no gradient: all go home. `offload.sharing.summing` sums them over processes.

    `updates` may begin where a gradient is final.
    """

    takes_gradients = False

    def __init__(self) -> None:
        self.updates: Updates = NO_UPDATES

    def begin_step(self, norms: bool) -> None:
        """Begins a step. `norms`: take those of the gradients."""

    def last_microbatch(self) -> None:
        """Declares that the gradients which land from now on in this step are final."""

    def take(self, unit: OffloadUnit, tensor: UnitTensor, gradient: torch.Tensor) -> bool:
        """Takes a gradient, or a piece of it; False leaves it to its home. Raises RuntimeError if it comes too late."""
        return False

    def check_host_use(self, unit: OffloadUnit, tensor: UnitTensor) -> None:
        """Raises RuntimeError where a loss cannot add to a gradient on the host."""

    def end_backward(self) -> None:
        """Ends the last microbatch, also after an error."""

    def release(self) -> None:
        """Hands device memory back, for use behind its copies."""

    def summed_parameters(self) -> frozenset[nn.Parameter]:
        """Returns the parameters whose gradients of the last step are sums over processes."""
        return frozenset()

    def known_norms(self, norms: Mapping[nn.Parameter, torch.Tensor]) -> dict[nn.Parameter, torch.Tensor]:
        """Returns those of `norms` that are of whole gradients."""
        return dict(norms)

    def close(self) -> None:
        """Ends it. The device is idle."""
