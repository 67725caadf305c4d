"""OffloadUnit: the parameters and buffers that move between host and device together.

A parameter that two units use has one home, in the first of them; the windows of the second open the first as well, so
that it is copied in once and its gradients are summed once.

[Note: the life of a unit's tensor]

1. At home. `bring_home` makes `tensor.host` a view of the unit's block in host memory. Between steps it is all there
   is.
2. Onloaded. `Prefetcher` copies the whole unit into a slot, on the h2d stream. The copy comes after the unit's updates
   (`Updates.before_onload`); compute waits for it by the event `slot.ready`.
3. Installed. When the first window on the unit opens, `stand_ins` puts `tensor.device`, a view of the slot, into the
   modules. Of a parameter it is the leaf that autograd sees: one leaf a step, whichever slot the unit is in.
4. Saved by name. Weights that autograd saves inside a window are saved as (unit, offset, shape, strides) by
   `SavedWeights`. When backward unpacks one, the unit is onloaded again if it has lost its slot.
5. Out of the window. When the last window closes, the modules hold `tensor.host` again. Buffers that forward changed
   are copied home on the d2h stream; `unit.written` ends that copy. The slot may be filled anew once `slot.free` is
   past.
6. Gradient landed. Autograd has summed all uses of the leaf: `GradientOffloader` copies the gradient home on the d2h
   stream, behind compute. `tensor.landed` ends the copy; `tensor.host.grad` is the host memory `tensor.gradient`.
7. Updated. Between steps by any optimizer; or by `offload.optimizer.overlap`, beside the step: on a thread that waits
   for `tensor.landed` and ends with a signal, or on the d2h stream, which ends with an event. The next onload of the
   unit waits for either, which is 2 again.

At the end of a step the host waits for all streams, the leaves are dropped, and no slot holds anything.
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
class ModuleAttribute:
    """The attribute of a module that holds a parameter or buffer."""

    module: nn.Module
    name: str
    is_buffer: bool

    @property
    def _tensors(self) -> dict[str, torch.Tensor]:
        return self.module._buffers if self.is_buffer else self.module._parameters

    @property
    def tensor(self) -> torch.Tensor:
        return self._tensors[self.name]

    def assign(self, tensor: torch.Tensor) -> None:
        """Makes the module hold `tensor`."""
        self._tensors[self.name] = tensor
        if isinstance(self.module, nn.RNNBase):
            refresh_flat_weights(self.module)


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: the modules that hold it, and its bytes in the unit's flat buffer.

    `host` is the tensor that modules hold outside of windows; once the unit is at home, its data is a view of the host
    block. `device` is its stand-in for the current step (written by `stand_ins`). `gradient` is host memory for its
    gradient. `GradientOffloader` writes the rest: `landed` ends the last copy into `gradient`, `landed_version` is
    autograd's version counter after that copy, and `norm` is the L2 norm of this step's gradient (a float32 scalar on
    the device) where norms are wanted.
    """

    name: str
    host: torch.Tensor
    attributes: list[ModuleAttribute]
    offset: int
    gradient: torch.Tensor | None = None
    landed: Event | None = None
    landed_version: int = 0
    norm: torch.Tensor | None = None
    device: torch.Tensor | None = None

    @property
    def is_buffer(self) -> bool:
        return self.attributes[0].is_buffer

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def has_landed_gradient(self) -> bool:
        """True if the parameter's gradient is the one that landed: not replaced, dropped or changed in place since."""
        return self.host.grad is self.gradient and self.gradient._version == self.landed_version

    @property
    def version(self) -> int:
        """Autograd's version counter of a parameter at home, which in-place changes raise; 0 for a buffer."""
        return 0 if self.is_buffer else self.host._version

    @property
    def nbytes(self) -> int:
        return self.host.nbytes

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this tensor's shape and dtype over its bytes in `flat` (uint8, laid out as the unit)."""
        piece = flat[self.offset : self.offset + self.nbytes]
        return piece.view(self.host.dtype).view(self.host.shape)

    def install(self, tensor: torch.Tensor) -> None:
        """Makes every module that has this parameter or buffer hold `tensor` in its place."""
        for attribute in self.attributes:
            attribute.assign(tensor)

    def __str__(self) -> str:
        return f"host gradient of {self.name}"


@dataclass(eq=False)
class OffloadUnit:
    """Tensors that move together; at home they are views of `weights`, one flat host block.

    `Prefetcher` writes `written`, which ends the last copy of buffers from the device into `weights`, and
    `open_windows`, the number of windows open on the unit.
    """

    name: str
    index: int
    tensors: list[UnitTensor] = field(default_factory=list)
    weights: HostBlock | None = None
    written: Event | None = None
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
        """Returns the tensor to which byte `offset` of the flat buffer belongs."""
        return self.tensors[bisect_right(self.tensors, offset, key=lambda tensor: tensor.offset) - 1]

    def check_home(self) -> None:
        """Checks that the unit can be streamed.

        Raises RuntimeError where a parameter no longer lives at home, as after `model.to(...)`, or where one trains
        that was frozen when the unit was brought home, so that its gradient has no host memory.
        """
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

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta tensors become zeros.

        Tensors that have memory keep their identity; those on the meta device are replaced in their modules.
        """
        self.weights = arena.allocate(self.nbytes, f"weights of {self.name}")
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.tensors:
            home = tensor.view_of(self.weights.bytes)
            tensor.host = move_into(home, tensor.host, tensor.attributes)
            if tensor.trains:
                flat = gradients.bytes[used : used + tensor.nbytes]
                # `.data` has a version counter of its own, which shows whether this gradient was changed.
                tensor.gradient = flat.view(home.dtype).view(home.shape).data
                used += aligned(tensor.nbytes)

    def __str__(self) -> str:
        return self.name


def move_into(memory: torch.Tensor, tensor: torch.Tensor, attributes: Iterable[ModuleAttribute]) -> torch.Tensor:
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
    for attribute in attributes:
        attribute.assign(real)
    return real


class DevicePlacement:
    """Puts parameters and buffers, given with the attributes that hold them, on `device`; `restore` puts them back.

    Tensors keep their identity, except those on the meta device, which are replaced by uninitialised memory for the
    caller to fill; `restore` moves these to the host.
    """

    def __init__(self, tensors: Iterable[tuple[torch.Tensor, list[ModuleAttribute]]], device: torch.device):
        self._origins: list[tuple[torch.Tensor, torch.device, ModuleAttribute]] = []
        for tensor, attributes in tensors:
            origin = torch.device("cpu") if tensor.is_meta and device.type != "meta" else tensor.device
            if tensor.device != device:
                memory = torch.empty_like(tensor, device=device, requires_grad=False)
                tensor = move_into(memory, tensor, attributes)
            self._origins.append((tensor, origin, attributes[0]))

    def restore(self) -> None:
        """Moves every tensor back to the device where it was found, with its values and its gradient."""
        for tensor, origin, attribute in self._origins:
            # A module may have replaced a buffer.
            current = attribute.tensor if attribute.is_buffer else tensor
            current.data = current.data.to(origin)
            if current.grad is not None:
                current.grad = current.grad.to(origin)
