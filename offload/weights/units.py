"""OffloadUnit: the parameters and buffers that move between host and device together.

A parameter that two units use has one home, in the first of them; the windows of the second open the first as well, so
that it is copied in once and its gradients are summed once.

[Note: the life of a unit's tensor]

1. At home. `bring_home` puts the data of `tensor.host` into the unit's block of host memory. Between steps it is all
   there is.
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
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from offload.runtime.host_memory import HostArena, HostBlock, aligned
from offload.runtime.registry import Event
from offload.runtime.tensor_parts import parts, version_of
from offload.runtime.torch_internals import count_references
from offload.weights.layouts import Layout, check_frozen, over
from offload.weights.placement import ModuleAttribute, held_by, move_into, move_to


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: the modules that hold it, and its bytes in the unit's flat buffer.

    `layout` says how it lies there. `host` is the tensor that modules hold outside of windows; once the unit is at
    home, its data lies in the host block. `origin` is the device on which it was found, and `found` is the tensor
    itself if that was the meta device.
    `device` is its stand-in for the current step, and `writes` counts the changes that forwards of this step have made
    to it; `stand_ins` writes both. `gradient` is host memory for its gradient. `GradientOffloader` writes the rest:
    `landed` ends the last copy into `gradient`, `landed_version` is autograd's version counter after that copy, and
    `norm` is the L2 norm of this step's gradient (a float32 scalar on the device) where norms are wanted.
    """

    name: str
    host: torch.Tensor
    attributes: list[ModuleAttribute]
    offset: int
    gradient: torch.Tensor | None = None
    # A loss has used the host tensor besides its stand-in.
    meets_host_gradient: bool = False
    landed_in: torch.Tensor | None = None
    landed: Event | None = None
    landed_version: int = 0
    norm: torch.Tensor | None = None
    device: torch.Tensor | None = None
    # While a window is open: the copy of `device` that modules hold in its place, for a buffer that may change.
    own_copy: torch.Tensor | None = None
    joined: torch.Tensor | None = None
    # By microbatch, where they run side by side.
    shares: dict[int, torch.Tensor] = field(default_factory=dict)
    writes: int = 0
    # Autograd's version counter of `device` when it was installed, or when its changes were last counted.
    device_version: int = 0
    # While a window is open: the attributes that hold a tensor of the window, that tensor, and what they held before if
    # it was not `host`.
    installed: list[tuple[ModuleAttribute, torch.Tensor, torch.Tensor | None]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found, self.origin = (self.host if self.host.is_meta else None), self.host.device
        self.shape, self.dtype = self.host.shape, self.host.dtype
        self.layout = Layout(self.host)

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
        """Counts the changes at home and by forwards of this step."""
        return self._version_of(self.host) + self.writes + self.new_writes

    @property
    def new_writes(self) -> int:
        """Counts the changes to `device` that are not in `writes` yet."""
        return 0 if self.device is None else self._version_of(self.device) - self.device_version

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of each plain tensor in `flat` (uint8, laid out as the unit), in the order of `parts`."""
        start = self.offset
        return self.layout.views(lambda offset, nbytes: flat[start + offset : start + offset + nbytes])

    def view_of(self, flat: torch.Tensor) -> torch.Tensor:
        """Returns this tensor's data over its bytes in `flat` (uint8, laid out as the unit)."""
        return over(self.host, self.views_of(flat))

    def parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the plain tensors of `host`, of its stand-in or of another tensor like it."""
        return parts(tensor) if self.layout.is_compound else [tensor]

    def count_writes(self) -> bool:
        """Adds to `writes` the changes to `device` that are not in it yet. Returns True if there are any."""
        new_writes = self.new_writes
        self.writes += new_writes
        self.device_version += new_writes
        return new_writes > 0

    def _version_of(self, tensor: torch.Tensor) -> int:
        return version_of(tensor) if self.layout.is_compound else tensor._version

    def is_at(self, address: int) -> bool:
        """True if the data of the host tensor is at `address`: its user has not given it other data."""
        pairs = zip(self.layout.pieces, self.parts_of(self.host), strict=False)
        return all(not piece.nbytes or part.data_ptr() == address + piece.offset for piece, part in pairs)

    def check_data(self, host: torch.Tensor, home: torch.device) -> None:
        """Raises RuntimeError in one line if `host` is a tensor that cannot be streamed in this one's place.

        `home` is the device of the unit's block: the host, and in a dry run the meta device.
        """
        if (host.shape, host.dtype, host.device) != (self.shape, self.dtype, home) or not self.layout.fits(host):
            raise RuntimeError(
                f"{self.name} is {host.dtype} of shape {tuple(host.shape)} on {host.device} now and was {self.dtype} of"
                f" shape {tuple(self.shape)} in host memory when the mode was attached: it was moved or replaced;"
                " detach the mode before model.to(), .cuda() or .half(), and attach it again"
            )

    def take_replacement(self, home: torch.device) -> None:
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
            how = "is no longer a parameter of its module: it was pruned, parametrized or deleted"
            if any(isinstance(tensor, nn.Parameter) for tensor in now.values()):
                how = "was replaced in one place and not in all that share it"
            raise RuntimeError(f"{self.name} {how}; detach the mode before that, and attach it again")
        self.check_data(new, home)
        self.host = new

    def make_gradient(self, memory: torch.Tensor) -> None:
        """Gives the gradient host memory: uint8 with a storage of its own, so that its users can be counted."""
        # `.data` has a version counter of its own, which shows whether this gradient was changed.
        self.gradient = self.layout.pieces[0].over(memory).data

    @property
    def gradient_is_held(self) -> bool:
        """True if somebody besides this object holds the memory of the gradient."""
        # In a dry run nobody keeps gradients, and all of a unit share one storage.
        return not self.gradient.is_meta and count_references(self.gradient) > 1

    def __str__(self) -> str:
        return f"host gradient of {self.name}"


@dataclass(eq=False)
class OffloadUnit:
    """Tensors that move together; at home they lie in `weights`, one flat host block, each with a storage of its own.

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

    @cached_property
    def has_compound(self) -> bool:
        """True if a tensor of the unit consists of several plain ones."""
        return any(tensor.layout.is_compound for tensor in self.tensors)

    @cached_property
    def buffer_places(self) -> list[tuple[nn.Module, str]]:
        """The modules that hold buffers of the unit, with the names there."""
        attributes = (attribute for tensor in self.tensors for attribute in tensor.attributes if tensor.is_buffer)
        return [(attribute.module, attribute.name) for attribute in attributes]

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
            tensor.check_data(tensor.host, self.weights.bytes.device)
        return strays

    def weights_now(self) -> list[tuple[int, int]]:
        """Returns what changes where the user changes a tensor at home: addresses and autograd's versions."""
        return self._versions(self.tensors)

    def parameters_now(self) -> list[tuple[int, int]]:
        """Returns the part of `weights_now` that forwards leave alone: they may change buffers."""
        return self._versions([tensor for tensor in self.tensors if not tensor.is_buffer])

    def _versions(self, tensors: list[UnitTensor]) -> list[tuple[int, int]]:
        hosts = (part for tensor in tensors for part in tensor.parts_of(tensor.host))
        return [(host.data_ptr(), 0 if host.is_inference() else host._version) for host in hosts]

    def gather(self, arena: HostArena) -> None:
        """Takes over, between steps, what the user has changed since the last: replaced tensors, data, what trains.

        Where data was given (`parameter.data = ...`) the unit moves into a new block, because the user may hold views
        of the old one as a backup. Raises RuntimeError in one line for what cannot be streamed.
        """
        for tensor in self.tensors:
            tensor.take_replacement(self.weights.bytes.device)
        if self.strays():
            old = self.weights
            self._move_into(arena.allocate(self.nbytes, old.name))
            arena.release(old)
        for tensor in self.trained:
            check_frozen(tensor.name, tensor.host)
            self.ensure_gradient(tensor, arena)

    def ensure_gradient(self, tensor: UnitTensor, arena: HostArena) -> None:
        """Makes host memory for a gradient that has none, as that of a parameter that was frozen when attached."""
        if tensor.gradient is None:
            tensor.make_gradient(arena.allocate(tensor.nbytes, f"gradient of {tensor.name}").bytes)

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta tensors become memory to fill.

        Tensors that have memory keep their identity; those on the meta device are replaced in their modules.
        """
        self._move_into(arena.allocate(self.nbytes, f"weights of {self.name}"))
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.trained:
            tensor.make_gradient(gradients.piece(used, tensor.nbytes))
            used += aligned(tensor.nbytes)

    def put_back(self) -> None:
        """Takes `bring_home` back, also one that failed: meta tensors are in their modules again."""
        for tensor in self.tensors:
            if tensor.found is not None:
                held_by(tensor.attributes, tensor.found)
        self.restore()

    def restore(self) -> None:
        """Moves every tensor back to the device where it was found; one that had no memory stays in the host's."""
        for tensor in self.tensors:
            current = tensor.attributes[0].tensor if tensor.is_buffer else tensor.host
            if current is not None and tensor.origin.type not in ("cpu", "meta"):
                move_to(current, tensor.origin, tensor.attributes)

    def _move_into(self, block: HostBlock) -> None:
        self.weights = block
        for tensor in self.tensors:
            # A storage for each: a file of one tensor would have all bytes of a storage that they share.
            start = tensor.offset
            memory = tensor.layout.views(lambda offset, nbytes, start=start: block.piece(start + offset, nbytes))
            tensor.host = move_into(memory, tensor.host, tensor.attributes)

    def __str__(self) -> str:
        return self.name
