"""Gives parameters and buffers other memory: at home (`move_into`), or on the device where they stay."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from offload.torch_private.tensor_parts import give_state, parts, wraps
from offload.torch_private.torch_internals import refresh_flat_weights
from offload.weights.units.layouts import over
from offload.weights.units.unfilled import mark


@dataclass(frozen=True)
class ModuleAttribute:
    """The attribute of a module that holds a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    @cached_property
    def is_recurrent(self) -> bool:
        """True if the module is a recurrent layer, which keeps a second list of its tensors."""
        return isinstance(self.module, nn.RNNBase)

    @property
    def tensors(self) -> dict[str, torch.Tensor | None]:
        """The dictionary of the module that has the tensor by its name."""
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def tensor(self) -> torch.Tensor | None:
        """The tensor that the module holds; None where its user has set None or deleted the attribute."""
        tensors = self.module._buffers if self.is_buffer else self.module._parameters
        try:
            return tensors.get(self.name)
        except AttributeError:
            # Those of a scripted module have no `get`.
            return tensors[self.name] if self.name in tensors else None  # noqa: SIM401

    def assign(self, tensor: torch.Tensor | None) -> None:
        """Makes the module hold `tensor`."""
        (self.module._buffers if self.is_buffer else self.module._parameters)[self.name] = tensor
        if self.is_recurrent:
            refresh_flat_weights(self.module)


def move_into(memory: list[torch.Tensor], tensor: torch.Tensor, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
    """Makes `memory`, a tensor for each part, the data of a parameter or buffer, keeping its values.

    A meta tensor has none: its memory is marked, so that it shows later whether somebody has filled it (`unfilled`).
    Returns the tensor that the modules hold afterwards: the same one, except for a meta tensor and for one that wraps
    others, whose device is fixed.
    """
    if tensor.is_meta:
        # `.data` has a version counter of its own: in a dry run all tensors of a unit share their memory's.
        memory = [piece.data for piece in memory]
        for piece in memory:
            mark(piece)
        return put_over(memory, tensor, attributes)
    for piece, part in zip(memory, parts(tensor), strict=True):
        piece.copy_(part.data)
    return give_memory(tensor, memory, attributes)


def put_over(memory: list[torch.Tensor], tensor: torch.Tensor, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
    """Makes `memory`, which has the values already, the data of a parameter or buffer. Returns it, as `move_into`."""
    if not tensor.is_meta:
        return give_memory(tensor, memory, attributes)
    real = over(tensor, memory)
    if isinstance(tensor, nn.Parameter) and not wraps(tensor):
        real = nn.Parameter(real, tensor.requires_grad)
    return held_by(attributes, real)


def move_to(tensor: torch.Tensor, device: torch.device, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
    """Moves a parameter or buffer to `device`, with its values and its gradient. Returns it, as `move_into` does."""
    moved = give_memory(tensor, [part.data.to(device) for part in parts(tensor)], attributes)
    # Afterwards: torch refuses a gradient on another device than the parameter's data.
    if tensor.grad is not None:
        moved.grad = tensor.grad.to(device)
    return moved


def held_by(attributes: Iterable[ModuleAttribute], tensor: torch.Tensor) -> torch.Tensor:
    """Makes the attributes hold `tensor`, and returns it."""
    for attribute in attributes:
        attribute.assign(tensor)
    return tensor


def give_memory(
    tensor: torch.Tensor, memory: list[torch.Tensor], attributes: Iterable[ModuleAttribute]
) -> torch.Tensor:
    """Makes `memory`, a tensor for each part, the data of a tensor, and returns it.

    A tensor that wraps others has no data of its own: the attributes get a new one, which is returned.
    """
    if wraps(tensor):
        return held_by(attributes, over(tensor, memory))
    tensor.data = memory[0]
    if len(memory) > 1:
        give_state(tensor, memory[1:])
    return tensor


class DevicePlacement:
    """Puts parameters and buffers, given with the attributes that hold them, on `device`; `restore` puts them back.

    Tensors keep their identity, except those on the meta device, which are replaced by memory for the caller to
    fill; `restore` moves these to the host. After an exception all are as they were found.
    """

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, list[ModuleAttribute]]], device: torch.device):
        # What was found, where it was, what it is now, and the attributes that hold it.
        self._moved: list[tuple[torch.Tensor, torch.device, torch.Tensor, list[ModuleAttribute]]] = []
        try:
            for found, attributes in tensors:
                origin, tensor = found.device, found
                if origin != device:
                    memory = [torch.empty_like(part, device=device, requires_grad=False) for part in parts(found)]
                    tensor = move_into(memory, found, attributes)
                # A tensor with memory that was replaced would only keep that memory.
                self._moved.append((found if found.is_meta else tensor, origin, tensor, attributes))
        except BaseException:
            self.put_back()
            raise

    def put_back(self) -> None:
        """Gives every tensor back as it was found: meta tensors are in their modules again."""
        for found, origin, _, attributes in self._moved:
            if origin.type == "meta":
                held_by(attributes, found)
            elif found.device != origin:
                move_to(found, origin, attributes)

    @property
    def held(self) -> list[tuple[torch.Tensor, list[ModuleAttribute]]]:
        """The tensors as the modules hold them now, each with its attributes."""
        return [(tensor, attributes) for _, _, tensor, attributes in self._moved]

    def restore(self) -> None:
        """Moves every tensor back to the device where it was found, with its values and its gradient."""
        for _, origin, tensor, attributes in self._moved:
            # A module may have replaced a buffer, or have none any more.
            current = attributes[0].tensor if attributes[0].is_buffer else tensor
            if current is not None:
                has_no_origin = origin.type == "meta" and not current.is_meta
                target = torch.device("cpu") if has_no_origin else origin
                if current.device != target:
                    move_to(current, target, attributes)
