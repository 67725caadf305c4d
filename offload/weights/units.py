"""OffloadUnit: the parameters that move between host and device together.

A mode names the modules at which a model is cut; `cut` turns that into units and windows. Parameters that a module
outside every cut uses as well stay resident. A parameter shared by two cuts has one home, in the first unit; the
windows of the second open that unit too, so that it is copied in once and its gradients are summed once.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.runtime.host_memory import HostArena, HostBlock, aligned
from offload.runtime.registry import Event
from offload.runtime.torch_internals import refresh_flat_weights


@dataclass(frozen=True)
class Place:
    """Where a module holds a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def _shelf(self) -> dict[str, torch.Tensor]:
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def held(self) -> torch.Tensor:
        return self._shelf[self.name]

    def put(self, tensor: torch.Tensor) -> None:
        self._shelf[self.name] = tensor
        if isinstance(self.module, nn.RNNBase):
            refresh_flat_weights(self.module)


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: where modules hold it and where it lies in the unit's flat buffer.

    `host` is what the modules hold outside a window; its data is a view of the host block once the unit is at home.
    `device` is its stand-in in a slot for the current step: for a parameter, the leaf that autograd sees. `gradient`
    is the host memory of its gradient, `landed` the end of the last copy there and `landed_version` autograd's version
    counter behind it, `norm` the L2 norm of what landed in this step (float32 scalar on the device), where somebody
    wants it.
    """

    name: str
    host: torch.Tensor
    places: list[Place]
    offset: int
    gradient: torch.Tensor | None = None
    landed: Event | None = None
    landed_version: int = 0
    norm: torch.Tensor | None = None
    device: torch.Tensor | None = None

    @property
    def is_buffer(self) -> bool:
        return self.places[0].is_buffer

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def has_landed_gradient(self) -> bool:
        """Whether the parameter's gradient is what landed: not replaced, dropped or changed in place since."""
        return self.host.grad is self.gradient and self.gradient._version == self.landed_version

    @property
    def version(self) -> int:
        """Autograd's version counter of a parameter at home; an in-place change shows here. 0 for a buffer."""
        return 0 if self.is_buffer else self.host._version

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """This tensor's shape and dtype over its bytes in `flat` (uint8, laid out as the unit)."""
        piece = flat[self.offset : self.offset + self.nbytes]
        return piece.view(self.host.dtype).view(self.host.shape)

    def install(self, tensor: torch.Tensor) -> None:
        for place in self.places:
            place.put(tensor)

    def __str__(self) -> str:
        return f"host gradient of {self.name}"


@dataclass(eq=False)
class OffloadUnit:
    """Tensors that move together; at home they are views of `weights`, one flat host block.

    `written` ends the last copy from the device into `weights`: buffers that forward updated; `updated`, the copies of
    weights that were updated there.
    """

    name: str
    index: int
    tensors: list[UnitTensor] = field(default_factory=list)
    weights: HostBlock | None = None
    written: Event | None = None
    updated: Event | None = None
    open_windows: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, alignment included."""
        return sum(aligned(tensor.nbytes) for tensor in self.tensors)

    @property
    def trained(self) -> list[UnitTensor]:
        """The tensors that train, in their order."""
        return [tensor for tensor in self.tensors if tensor.trains]

    @property
    def gradient_bytes(self) -> int:
        return sum(aligned(tensor.nbytes) for tensor in self.trained)

    def tensor_at(self, offset: int) -> UnitTensor:
        """The tensor to which byte `offset` of the flat buffer belongs."""
        return self.tensors[bisect_right(self.tensors, offset, key=lambda tensor: tensor.offset) - 1]

    def check_home(self) -> None:
        """Raises RuntimeError if a parameter no longer lives at home, as after `model.to(...)`, or its gradient has
        none, as that of one which was frozen when the unit was brought home."""
        for tensor in self.tensors:
            home = self.weights.bytes.data_ptr() + tensor.offset
            if not tensor.is_buffer and tensor.nbytes and tensor.host.data_ptr() != home:
                raise RuntimeError(
                    f"{tensor.name} was moved or replaced while attached: detach the mode before model.to(), .cuda()"
                    " or .half(), and attach it again"
                )
            if tensor.trains and tensor.gradient is None:
                raise RuntimeError(
                    f"{tensor.name} was frozen when the mode was attached: detach and attach again to train it"
                )

    def drop_stand_ins(self) -> None:
        """Forgets the device stand-ins: the next window makes new ones."""
        for tensor in self.tensors:
            tensor.device = None

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta ones left as zeros.

        What had memory keeps its identity; what is on the meta device is replaced in its modules.
        """
        self.weights = arena.allocate(self.nbytes, f"weights of {self.name}")
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.tensors:
            home = tensor.view_of(self.weights.bytes)
            tensor.host = move_into(home, tensor.host, tensor.places)
            if tensor.trains:
                flat = gradients.bytes[used : used + tensor.nbytes]
                # `.data` has a version counter of its own, which tells whether somebody changed this gradient.
                tensor.gradient = flat.view(home.dtype).view(home.shape).data
                used += aligned(tensor.nbytes)

    def __str__(self) -> str:
        return self.name


def move_into(memory: torch.Tensor, tensor: torch.Tensor, places: Iterable[Place]) -> torch.Tensor:
    """Makes `memory` the data of a parameter or buffer, keeping its values unless it is on the meta device.

    Returns the tensor that the modules hold afterwards: the same one, except for a meta tensor.
    """
    if not tensor.is_meta:
        memory.copy_(tensor.data)
        tensor.data = memory
        return tensor
    # `.data` has a version counter of its own: all tensors of a unit are views of the same memory.
    memory = memory.data
    real = nn.Parameter(memory, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else memory
    for place in places:
        place.put(real)
    return real


class DevicePlacement:
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
