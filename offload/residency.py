"""What stays on the device: parameters and buffers placed there for as long as a mode is attached."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from offload.unit import place_parameter


class Residency:
    """Places `parameters` and every buffer of `model` on `device`; `restore` puts them back.

    Parameters keep their identity, except those on the meta device, which are replaced by uninitialised memory that
    the caller fills (buffers likewise). What was on the meta device goes to the host on `restore`.
    """

    def __init__(
        self,
        model: nn.Module,
        parameters: Iterable[tuple[nn.Parameter, list[tuple[nn.Module, str]]]],
        device: torch.device,
    ):
        self._device = device
        self._parameters: list[tuple[nn.Parameter, torch.device]] = []
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []
        for parameter, places in parameters:
            origin = _home(parameter)
            memory = torch.empty_like(parameter, device=device, requires_grad=False)
            placed = place_parameter(parameter, memory, places) if parameter.device != device else parameter
            self._parameters.append((placed, origin))
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    self._buffers.append((module, name, _home(buffer)))
                    module._buffers[name] = _moved(buffer, device)

    def restore(self) -> None:
        """Moves everything back to the device where it was found; values are kept, gradients go along."""
        for parameter, origin in self._parameters:
            parameter.data = parameter.data.to(origin)
            if parameter.grad is not None:
                parameter.grad = parameter.grad.to(origin)
        for module, name, origin in self._buffers:
            module._buffers[name] = module._buffers[name].to(origin)


def _home(tensor: torch.Tensor) -> torch.device:
    return torch.device("cpu") if tensor.is_meta else tensor.device


def _moved(buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    return torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.to(device)
