"""OffloadUnit: the parameters and buffers that move between host and device together, each a `UnitTensor`.

A parameter that two units use has one home, in the first of them; the windows of the second open the first as well, so
that it is copied in once and its gradients are summed once.

[Note: the life of a unit's tensor]

1. At home. `bring_home` puts the data of `tensor.host` into the unit's block of host memory. Between steps it is all
   there is. An extension may put a unit somewhere else (`Filler`).
2. Onloaded. `Prefetcher` copies the whole unit into a slot, on the h2d stream. The copy comes after the unit's updates
   (`Updates.before_onload`); compute waits for it by the event `slot.ready`.
3. Installed. When the first window on the unit opens, `stand_ins` puts its `StandIn.device`, a view of the slot, into
   the modules that hold `tensor.host`. A parameter that trains has one stand-in a step, whichever slot the unit is in,
   and autograd's graph joins it to the host parameter.
4. Saved by name. Weights that autograd saves inside a window are saved as (unit, offset, shape, strides) by
   `SavedWeights`. When backward unpacks one, the unit is onloaded again if it has lost its slot.
5. Out of the window. When the last window closes, the modules hold `tensor.host` again. Buffers that forward changed
   are copied home on the d2h stream; `unit.written` ends that copy. The slot may be filled anew once `slot.free` is
   past.
6. Gradient landed. Autograd has summed all uses of the stand-in. `GradientLanding` decides where the gradient goes; as
   a rule `GradientOffloader` copies it home, small ones together, on the d2h stream, behind compute, to
   `tensor.gradient.memory` or into the gradient that was there. `tensor.gradient.landed` ends the copy.
7. Updated. Between steps by any optimizer; or by `offload.optimizer.overlap`, beside the step: on a thread that waits
   for `tensor.gradient.landed` and ends with a signal, or on the d2h stream, which ends with an event. The next onload
   of the unit waits for either, which is 2 again.

At the end of a step the host waits for all streams, modules hold no stand-ins, and no slot holds anything. When the
next begins, `user_changes` takes over what the user has changed meanwhile: replaced parameters, other data.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from offload.memory.host_memory import ALIGNMENT_BYTES, HostArena, HostBlock, aligned
from offload.streams.registry import Event
from offload.torch_private.tensor_parts import Places, TakenApart, places_of
from offload.torch_private.torch_internals import gradient_hooks, without_torch_function
from offload.weights.units.placement import Layout, ModuleAttribute, Piece, held_by, move_into, move_to, put_over


class GradientSlot:
    """Memory at home for one gradient, which lies in it as `piece` says; `name` is that of the parameter.

    `memory` is None for a parameter that is frozen, or whose gradients go somewhere else. The last gradient was copied
    into `landed_in`, which is that or the parameter's earlier gradient, until `landed`; `_version` is autograd's
    version counter after it. `norm`: of this step's gradient, a float32 scalar on the device, where wanted.
    `is_released`: that gradient went to its update. `meets_host_gradient`: a loss has used the parameter on the host
    besides.
    """

    def __init__(self, name: str, piece: Piece):
        self._name, self._piece = name, piece
        self.memory: torch.Tensor | None = None
        self.landed_in: torch.Tensor | None = None
        self.landed: Event | None = None
        self.norm: torch.Tensor | None = None
        self.is_released = False
        self.meets_host_gradient = False
        self._version = 0

    def over(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a gradient over `memory`, uint8, of the parameter's shape, strides and dtype."""
        # `.data` has a version counter of its own, which shows whether this gradient was changed.
        return self._piece.over(memory).data

    def lie_in(self, memory: torch.Tensor) -> None:
        """Gives the gradient host memory: uint8 with a storage of its own, so that its users can be counted."""
        self.memory = self.over(memory)

    def make_memory(self, arena: HostArena) -> None:
        """Gives the gradient a block of its own."""
        self.lie_in(arena.allocate(self._piece.nbytes, f"gradient of {self._name}").bytes)

    def begin_step(self) -> None:
        """Forgets what the last step has noted."""
        self.norm, self.is_released = None, False

    def lands(self, host: nn.Parameter, target: torch.Tensor, done: Event) -> None:
        """Notes that the gradient of `host` is in `target` once `done` is past, and makes it the one of `.grad`."""
        self.landed, self.landed_in, self._version = done, target, target._version
        host.grad = target

    def is_as_landed(self, host: nn.Parameter) -> bool:
        """Tells whether the gradient of `host` is the one that landed: not replaced, dropped or changed since."""
        landed_in = self.landed_in
        return landed_in is not None and host.grad is landed_in and landed_in._version == self._version

    def leaves_to_autograd(self, host: nn.Parameter, gradient: torch.Tensor) -> bool:
        """Tells whether autograd gets this gradient of `host` in host memory, and accumulates it there itself.

        Hooks run there, and change what is accumulated. Where a loss uses the weight on the host, autograd adds that
        gradient first. It also joins sparse gradients, converts other dtypes, and keeps the graph of `create_graph`.
        """
        earlier = host.grad
        return bool(
            any(gradient_hooks(host))
            or (self.meets_host_gradient and earlier is not None)
            or gradient.requires_grad
            or gradient.layout is not torch.strided
            or (earlier is not None and (earlier.layout is not torch.strided or earlier.dtype is not gradient.dtype))
        )

    def __str__(self) -> str:
        return f"host gradient of {self._name}"


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: the modules that hold it, and its bytes in the unit's flat buffer.

    `layout` says how it lies there. `host` is the tensor that modules hold outside of windows; once the unit is at
    home, its data lies in the host block, or where an extension has put it, at the addresses `home` of its parts.
    `origin` is the device on which it was found, and `found` is the tensor itself if that was the meta device.
    `gradient` is where its gradient goes at home. Its stand-in on the device is with `windows.stand_in`.
    """

    name: str
    host: torch.Tensor
    attributes: list[ModuleAttribute]
    offset: int
    home: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.found, self.origin = (self.host if self.host.is_meta else None), self.host.device
        self.shape, self.dtype = self.host.shape, self.host.dtype
        self.layout = Layout(self.host)
        # Those of its first part.
        self.strides = self.layout.pieces[0].strides
        self.is_buffer = self.attributes[0].is_buffer
        self.gradient = GradientSlot(self.name, self.layout.pieces[0])
        self._home_places: Places | None = None
        self._taken_apart: TakenApart | None = None

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def views_of(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Returns a view of each plain tensor in `flat` (uint8, laid out as the unit), in the order of `parts`."""
        start = self.offset
        return self.layout.views(lambda offset, nbytes: flat[start + offset : start + offset + nbytes])

    @property
    def parts(self) -> list[torch.Tensor]:
        """The plain tensors of which `host` consists."""
        return self.taken_apart.parts if self.layout.is_compound else [self.host]

    @property
    def taken_apart(self) -> TakenApart:
        """The parts of a `host` that consists of several, kept until it gets others, or until `forget_parts`.

        To take a tensor apart runs much code of its class.
        """
        taken = self._taken_apart
        if taken is None or taken.tensor is not self.host or not taken.is_current:
            taken = self._taken_apart = TakenApart(self.host)
        return taken

    def forget_parts(self) -> None:
        """Takes `host` apart anew from now on, where its user may have given it other parts that nothing shows."""
        if self._taken_apart is not None and not self._taken_apart.shows_parts:
            self._taken_apart = None

    @property
    def is_home(self) -> bool:
        """True if the data of the host tensor is at home: its user has not given it other data.

        The same memory in another order, as `weight.data.t()` is, is other data.
        """
        if not self.layout.is_compound:
            host, nothing = self.host, not self.home or not self.nbytes
            return nothing or (host.data_ptr() == self.home[0] and host.stride() == self.strides)
        return not self.home or self.taken_apart.places == self._home_places

    def move_into(self, memory: list[torch.Tensor]) -> None:
        """Makes `memory`, a tensor for each part, the home of the tensor, with its values."""
        self.host = move_into(memory, self.host, self.attributes)
        self._lies_in(memory)

    def lie_in(self, views: list[torch.Tensor]) -> None:
        """Makes `views`, uint8, one for each part, the home of the tensor, with the values that are there."""
        memory = [piece.over(view) for piece, view in zip(self.layout.pieces, views, strict=True)]
        self.host = put_over(memory, self.host, self.attributes)
        self._lies_in(memory)

    def _lies_in(self, memory: list[torch.Tensor]) -> None:
        self.home = [piece.data_ptr() for piece in memory]
        self._home_places = places_of(memory)

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


@dataclass(eq=False)
class OffloadUnit:
    """Tensors that move together; at home they lie in `weights`, one flat host block, each with a storage of its own.

    Each begins at a multiple of `alignment`. `is_fixed`: an extension has put them somewhere else for good, and the
    block is empty. `Prefetcher` counts the windows that are open, and writes `written`, the end of the last copy of
    buffers home.
    """

    name: str
    index: int
    tensors: list[UnitTensor] = field(default_factory=list)
    weights: HostBlock | None = None
    written: Event | None = None
    open_windows: int = 0
    # Its updates have begun inside this backward: what a slot has of it is out of date, and not read again.
    has_begun_updates: bool = False
    is_fixed: bool = False
    alignment: int = ALIGNMENT_BYTES

    @property
    def nbytes(self) -> int:
        """Bytes of the flat buffer, alignment included."""
        return sum(aligned(tensor.nbytes, self.alignment) for tensor in self.tensors)

    @cached_property
    def compound(self) -> list[UnitTensor]:
        """The tensors that consist of several."""
        return [tensor for tensor in self.tensors if tensor.layout.is_compound]

    @cached_property
    def parameters(self) -> list[UnitTensor]:
        """The tensors that are no buffers."""
        return [tensor for tensor in self.tensors if not tensor.is_buffer]

    @property
    def trained(self) -> list[UnitTensor]:
        """The tensors that train, in their order."""
        if self.compound:
            # Each of these would call a function of its class.
            with without_torch_function():
                return [tensor for tensor in self.tensors if tensor.host.requires_grad]
        return [tensor for tensor in self.tensors if tensor.host.requires_grad]

    @property
    def gradient_bytes(self) -> int:
        return sum(aligned(tensor.nbytes, self.alignment) for tensor in self.trained)

    @cached_property
    def buffer_places(self) -> list[tuple[nn.Module, str]]:
        """The modules that hold buffers of the unit, with the names there."""
        attributes = (attribute for tensor in self.tensors for attribute in tensor.attributes if tensor.is_buffer)
        return [(attribute.module, attribute.name) for attribute in attributes]

    def index_at(self, offset: int) -> int:
        """Returns the index of the tensor to which byte `offset` of the flat buffer belongs."""
        return bisect_right(self.starts, offset) - 1

    @cached_property
    def starts(self) -> list[int]:
        """The offset of each tensor in the flat buffer."""
        return [tensor.offset for tensor in self.tensors]

    def home_of(self, tensor: UnitTensor) -> list[torch.Tensor]:
        """Returns the memory of each part of `tensor` at home, or where its user has given it other data."""
        if tensor.is_home and not self.is_fixed:
            return tensor.views_of(self.weights.bytes)
        return [part.data for part in tensor.parts]

    def strays(self) -> list[UnitTensor]:
        """Returns the tensors with data that is not at home, given by the user. Raises RuntimeError for other kinds."""
        if self.compound:
            strays = [tensor for tensor in self.tensors if not tensor.is_home]
        else:
            strays = []
            for tensor in self.tensors:
                # `is_home`, without the call: each copy in asks for every tensor.
                home, host = tensor.home, tensor.host
                if home and (host.data_ptr() != home[0] or host.stride() != tensor.strides) and tensor.nbytes:
                    strays.append(tensor)
        for tensor in strays:
            tensor.check_data(tensor.host, self.weights.bytes.device)
        return strays

    def weights_now(self) -> list[tuple]:
        """Returns addresses, strides and version counters, which change where the user changes a tensor at home."""
        return self._versions(self.tensors)

    def parameters_now(self) -> list[tuple]:
        """Returns the part of `weights_now` that forwards leave alone: they may change buffers."""
        return self._versions(self.parameters)

    def _versions(self, tensors: list[UnitTensor]) -> list[tuple]:
        found = []
        for tensor in tensors:
            for host in tensor.parts if tensor.layout.is_compound else (tensor.host,):
                # Tensors of inference mode have no version.
                found.append((host.data_ptr(), 0 if host.is_inference() else host._version, host.stride()))
        return found

    def notice_writes(self) -> None:
        """Looks anew at tensors that consist of several, whose user may have given them other parts."""
        for tensor in self.compound:
            tensor.forget_parts()

    def bring_home(self, arena: HostArena) -> None:
        """Moves the tensors into host blocks of the arena: real values are copied, meta tensors become memory to fill.

        Tensors that have memory keep their identity; those on the meta device are replaced in their modules.
        """
        self.move_into(arena.allocate(self.nbytes, f"weights of {self.name}"))

    def make_gradient_homes(self, arena: HostArena) -> None:
        """Makes one block of host memory for the gradients of all that trains now."""
        gradients = arena.allocate(self.gradient_bytes, f"gradients of {self.name}")
        used = 0
        for tensor in self.trained:
            tensor.gradient.lie_in(gradients.piece(used, tensor.nbytes))
            used += aligned(tensor.nbytes, self.alignment)

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

    def move_into(self, block: HostBlock) -> None:
        """Makes `block` the home of all tensors, with their values."""
        self.weights = block
        for tensor in self.tensors:
            # A storage for each: a file of one tensor would have all bytes of a storage that they share.
            start = tensor.offset
            tensor.move_into(tensor.layout.views(lambda offset, n, start=start: block.piece(start + offset, n)))

    def __str__(self) -> str:
        return self.name
