"""What stays on the device: tensors placed there for as long as a mode is attached."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from offload.unit import Place, move_into


class Residency:
    """Places parameters and buffers, given with their places in modules, on `device`; `restore` puts them back.

    Tensors keep their identity, except those on the meta device, which are replaced by uninitialised memory that the
    caller fills. What was on the meta device goes to the host on `restore`.
    """

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, list[Place]]], device: torch.device):
        self._origins: list[tuple[torch.Tensor, torch.device, Place]] = []
        for tensor, places in tensors:
            origin = torch.device("cpu") if tensor.is_meta and device.type != "meta" else tensor.device
            if tensor.device != device:
                memory = torch.empty_like(tensor, device=device, requires_grad=False)
                tensor = move_into(memory, tensor, places)
            self._origins.append((tensor, origin, places[0]))

    def restore(self) -> None:
        """Moves everything back to the device where it was found; values are kept, gradients go along."""
        for tensor, origin, place in self._origins:
            # A module may have put another tensor in a buffer's place.
            held = place.held if place.is_buffer else tensor
            held.data = held.data.to(origin)
            if held.grad is not None:
                held.grad = held.grad.to(origin)
