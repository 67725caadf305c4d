"""Keeps the gradients of microbatches that run side by side apart, for the parameters that stay on the device.

One microbatch after another, autograd sums the gradients of all uses of a parameter in a microbatch, and adds the sum
to the parameter's gradient. Side by side it would sum all uses of all microbatches, in another order. So in the turns
of a microbatch modules hold its own share of each parameter: the same memory, with a node of its own in autograd's
graph, which sums its uses. Parameters that stream have shares as well, in `stand_ins`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from offload.torch_private.tensor_parts import lies_flat
from offload.torch_private.threads import SideBySideError
from offload.weights.units.placement import ModuleAttribute
from offload.weights.windows.stand_in import like_host, share_of


class ResidentShares:
    """The shares of the resident parameters, which the given attributes hold."""

    def __init__(self, resident: Iterable[tuple[torch.Tensor, list[ModuleAttribute]]]):
        self._attributes = [
            attribute for _, attributes in resident for attribute in attributes if not attribute.is_buffer
        ]
        # By microbatch and parameter.
        self._shares: dict[tuple[int, nn.Parameter], torch.Tensor] = {}
        self._held: dict[ModuleAttribute, torch.Tensor | None] = {}

    def begin(self) -> None:
        """Begins turns, in which modules hold the parameters that they hold now."""
        self._held = {attribute: attribute.tensor for attribute in self._attributes}

    @contextmanager
    def turn(self, microbatch: int) -> Iterator[None]:
        """Makes modules hold the shares of `microbatch` for the length of the block.

        Raises SideBySideError, once, if a microbatch has replaced one of the parameters.
        """
        for attribute, held in self._held.items():
            if attribute.tensor is not held:
                # The other microbatches still have turns, in which they end.
                self._held = {}
                what = f"{attribute.name} of a {type(attribute.module).__name__}"
                raise SideBySideError(f"{what} is replaced (torch.func.functional_call)")
        installed = []
        for attribute in self._attributes:
            parameter = attribute.tensor
            # Not a tensor of another class that acts as a parameter, or a sparse one: it may have no memory of its own.
            if issubclass(type(parameter), nn.Parameter) and parameter.requires_grad and lies_flat(parameter):
                share = self._share(microbatch, parameter)
                attribute.assign(share)
                installed.append((attribute, share, parameter))
        try:
            yield
        finally:
            for attribute, share, parameter in installed:
                if attribute.tensor is share:
                    attribute.assign(parameter)
                if share.data_ptr() != parameter.data_ptr():
                    # Forward has given it other data.
                    parameter.data = share.data

    def drop(self) -> None:
        """Forgets the shares: the next microbatches get new ones."""
        self._shares.clear()
        self._held = {}

    def _share(self, microbatch: int, parameter: nn.Parameter) -> torch.Tensor:
        share = self._shares.get((microbatch, parameter))
        if share is None:
            # Detached, it has the parameter's version counter.
            share = like_host(share_of(parameter, parameter.detach()), parameter)
            self._shares[microbatch, parameter] = share
        return share
