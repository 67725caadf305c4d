"""OffloadUnit: the parameters and buffers that move between host and device together.

A parameter that two units use has one home, in the first of them; the windows of the second open the first as well, so
that it is copied in once and its gradients are summed once.

[Note: the life of a unit's tensor]

1. At home. `bring_home` makes `tensor.host` a view of the unit's block in host memory. Between steps it is all there
   is.
2. Onloaded. `Prefetcher` copies the whole unit into a slot, on the h2d stream. The copy comes after the unit's updates
   (`Updates.before_onload`); compute waits for it by the event `slot.ready`.
3. Installed. When the first window on the unit opens, `stand_ins` puts `tensor.device`, a view of the slot, into the
   modules that hold `tensor.host`. A parameter that trains has one stand-in a step, whichever slot the unit is in, and
   autograd's graph joins it to the host parameter.
4. Saved by name. Weights that autograd saves inside a window are saved as (unit, offset, shape, strides) by
   `SavedWeights`. When backward unpacks one, the unit is onloaded again if it has lost its slot.
5. Out of the window. When the last window closes, the modules hold `tensor.host` again. Buffers that forward changed
   are copied home on the d2h stream; `unit.written` ends that copy. The slot may be filled anew once `slot.free` is
   past.
6. Gradient landed. Autograd has summed all uses of the stand-in: `GradientOffloader` copies the gradient home on the
   d2h stream, behind compute, to `tensor.gradient` or into the gradient that was there. `tensor.landed` ends the copy.
7. Updated. Between steps by any optimizer; or by `offload.optimizer.overlap`, beside the step: on a thread that waits
   for `tensor.landed` and ends with a signal, or on the d2h stream, which ends with an event. The next onload of the
   unit waits for either, which is 2 again.

At the end of a step the host waits for all streams, the stand-ins are dropped, and no slot holds anything. When the
next begins, `gather` takes over what the user has changed meanwhile: replaced parameters, other data, what trains.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.runtime.host_memory import HostArena, HostBlock, aligned
from offload.runtime.registry import Event
from offload.runtime.torch_internals import count_references, refresh_flat_weights


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
    def tensor(self) -> torch.Tensor | None:
        """The tensor that the module holds; None where its user has set None or deleted the attribute."""
        return self._tensors.get(self.name)

    def assign(self, tensor: torch.Tensor | None) -> None:
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
    landed_in: torch.Tensor | None = None
    landed: Event | None = None
    landed_version: int = 0
    norm: torch.Tensor | None = None
    device: torch.Tensor | None = None
    joined: torch.Tensor | None = None
    # While a window is open: the attributes that hold a tensor of the window, that tensor, and what they held before if
    # it was not `host`.
    installed: list[tuple[ModuleAttribute, torch.Tensor, torch.Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.shape, self.dtype = self.host.shape, self.host.dtype
        self.strides = self.host.stride() if _is_dense(self.host) else _contiguous_strides(self.shape)

    @property
    def is_buffer(self) -> bool:
        return self.attributes[0].is_buffer

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def has_landed_gradient(self) -> bool:
        """True if the parameter's gradient is the one that landed: not replaced, dropped or changed in place since."""
        landed_in = self.landed_in
        return landed_in is not None and self.host.grad is landed_in and landed_in._version == self.landed_version

    @property
    def version(self) -> int:
        """Autograd's version counter of a parameter at home, which in-place changes raise; 0 for a buffer."""
        return 0 if self.is_buffer else self.host._version

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this tensor's shape, strides and dtype over its bytes in `flat` (uint8, laid out as the unit)."""
        return self.over(flat[self.offset : self.offset + self.nbytes])

    def over(self, piece: torch.Tensor) -> torch.Tensor:
        """Returns this tensor's shape, strides and dtype over `piece`: uint8, contiguous, of as many bytes."""
        return piece.view(self.dtype).as_strided(self.shape, self.strides)

    def is_at(self, address: int) -> bool:
        """True if the data of the host tensor is at `address`: its user has not given it other data."""
        return not self.nbytes or self.host.data_ptr() == address

    def check_data(self) -> None:
        """Raises RuntimeError in one line if the host tensor has other data that cannot be streamed in its place."""
        host = self.host
        if host.shape != self.shape or host.dtype != self.dtype or host.device.type not in ("cpu", "meta"):
            raise RuntimeError(
                f"{self.name} is {host.dtype} of shape {tuple(host.shape)} on {host.device} now and was {self.dtype} of"
                f" shape {tuple(self.shape)} in host memory when the mode was attached: it was moved or replaced;"
                " detach the mode before model.to(), .cuda() or .half(), and attach it again"
            )

    def take_replacement(self) -> None:
        """Takes the tensor that all modules hold now in place of `host`, if it can be streamed as that was.

        `load_state_dict(assign=True)` and the assignment of a new parameter replace it so. A buffer of another shape or
        dtype is left to its modules. Raises RuntimeError for a parameter that cannot be streamed.
        """
        now = {id(attribute.tensor): attribute.tensor for attribute in self.attributes}
        if id(self.host) in now and len(now) == 1:
            return
        new = next(iter(now.values()))
        if self.is_buffer:
            alike = len(now) == 1 and new is not None and (new.shape, new.dtype) == (self.shape, self.dtype)
            if alike and new.device.type == "cpu":
                self.host = new
            return
        if len(now) > 1 or not isinstance(new, nn.Parameter):
            raise RuntimeError(
                f"{self.name} was replaced in one place and not in all that share it, or by no parameter: detach the"
                " mode, and attach it again"
            )
        self.host = new
        self.check_data()

    def make_gradient(self, memory: torch.Tensor) -> None:
        """Gives the gradient host memory: uint8 with a storage of its own, so that its users can be counted."""
        # `.data` has a version counter of its own, which shows whether this gradient was changed.
        self.gradient = self.over(memory).data

    @property
    def gradient_is_held(self) -> bool:
        """True if somebody besides this object holds the memory of the gradient."""
        # In a dry run nobody keeps gradients, and all of a unit share one storage.
        return not self.gradient.is_meta and count_references(self.gradient) > 1

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

    def home_address(self, tensor: UnitTensor) -> int:
        """Returns where the data of `tensor` is at home."""
        return self.weights.bytes.data_ptr() + tensor.offset

    def strays(self) -> list[UnitTensor]:
        """Returns the tensors with data that is not at home, given by the user. Raises RuntimeError for other kinds."""
        strays = [tensor for tensor in self.tensors if not tensor.is_at(self.home_address(tensor))]
        for tensor in strays:
            tensor.check_data()
        return strays

    def weights_now(self) -> list[tuple[int, int]]:
        """Returns what changes where the weights do: the address and autograd's version of each parameter."""
        return [(tensor.host.data_ptr(), tensor.host._version) for tensor in self.tensors if not tensor.is_buffer]

    def gather(self, arena: HostArena) -> None:
        """Takes over, between steps, what the user has changed since the last: replaced tensors, data, what trains.

        Where data was given (`parameter.data = ...`) the unit moves into a new block, because the user may hold views
        of the old one as a backup. Raises RuntimeError in one line for what cannot be streamed.
        """
        for tensor in self.tensors:
            tensor.take_replacement()
        if self.strays():
            old = self.weights
            self._move_into(arena.allocate(self.nbytes, old.name))
            arena.release(old)
        for tensor in self.trained:
            self.ensure_gradient(tensor, arena)

    def ensure_gradient(self, tensor: UnitTensor, arena: HostArena) -> None:
        """Makes host memory for a gradient that has none, as that of a parameter that was frozen when attached."""
        if tensor.gradient is None:
            tensor.make_gradient(arena.allocate(tensor.nbytes, f"gradient of {tensor.name}").bytes)

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta tensors become zeros.

        Tensors that have memory keep their identity; those on the meta device are replaced in their modules.
        """
        self._move_into(arena.allocate(self.nbytes, f"weights of {self.name}"))
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.trained:
            tensor.make_gradient(gradients.piece(used, tensor.nbytes))
            used += aligned(tensor.nbytes)

    def _move_into(self, block: HostBlock) -> None:
        self.weights = block
        for tensor in self.tensors:
            tensor.host = move_into(tensor.view_of(block.bytes), tensor.host, tensor.attributes)

    def __str__(self) -> str:
        return self.name


def _is_dense(tensor: torch.Tensor) -> bool:
    """Tells whether the elements of a tensor fill its memory without holes and overlaps, in whichever order."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


def _contiguous_strides(shape: torch.Size) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


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
