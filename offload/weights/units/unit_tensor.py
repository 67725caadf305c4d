"""UnitTensor: a parameter or buffer of a unit. `unit.py` has the note on its life."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.streams.registry import Event
from offload.torch_private.tensor_parts import Places, TakenApart, parts, places_of
from offload.torch_private.torch_internals import gradient_hooks
from offload.weights.units.layouts import Layout
from offload.weights.units.placement import ModuleAttribute, move_into, put_over


@dataclass(eq=False)
class UnitTensor:
    """A parameter or buffer of a unit: the modules that hold it, and its bytes in the unit's flat buffer.

    `layout` says how it lies there. `host` is the tensor that modules hold outside of windows; once the unit is at
    home, its data lies in the host block, or where an extension has put it.
    `origin` is the device on which it was found, and `found` is the tensor itself if that was the meta device.
    `device` is its stand-in for the current step, and `writes` counts the changes that forwards of this step have made
    to it; `stand_ins` writes both. `gradient` is host memory for its gradient. `GradientOffloader` writes the rest:
    `landed` ends the last copy into `gradient`, `landed_version` is autograd's version counter after that copy, and
    `norm` is the L2 norm of this step's gradient (a float32 scalar on the device) where norms are wanted.
    """

    name: str
    host: torch.Tensor
    attributes: list[ModuleAttribute]
    offset: int
    # The addresses of its parts at home.
    home: list[int] = field(default_factory=list)
    gradient: torch.Tensor | None = None
    # A loss has used the host tensor besides its stand-in.
    meets_host_gradient: bool = False
    # This step's gradient went to its update, and is in no `.grad`.
    is_released: bool = False
    landed_in: torch.Tensor | None = None
    landed: Event | None = None
    landed_version: int = 0
    norm: torch.Tensor | None = None
    device: torch.Tensor | None = None
    # While a window is open: the copy of `device` that modules hold in its place, for a buffer that may change.
    own_copy: torch.Tensor | None = None
    # The stand-in of a parameter that is one tensor, of this step or of the last. Where the parameter trains, the
    # graph of autograd joins the two.
    joined: torch.Tensor | None = None
    joined_before: torch.Tensor | None = None
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
        # Those of its first part.
        self.strides = self.layout.pieces[0].strides
        self.is_buffer = self.attributes[0].is_buffer
        self._home_places: Places | None = None
        # For one that consists of several: the tensor at home, and that on the device.
        self._host_parts: TakenApart | None = None
        self._device_parts: TakenApart | None = None
        self.slot_views: dict[int, list[torch.Tensor]] = {}
        """what `views_in` has returned, by the index of the slot"""
        self._described_views: dict[int, list[tuple]] = {}
        # A stand-in, the places of its parts, and the host tensor for which it was made.
        self._stand_ins: dict[int, tuple[TakenApart, Places, TakenApart]] = {}

    @property
    def trains(self) -> bool:
        return self.host.requires_grad

    @property
    def has_landed_gradient(self) -> bool:
        """True if the parameter's gradient is the one that landed: not replaced, dropped or changed in place since."""
        landed_in = self.landed_in
        return landed_in is not None and self.host.grad is landed_in and landed_in._version == self.landed_version

    @property
    def state(self) -> tuple[int, object]:
        """A value that changes when the weight is changed at home, or gets other data, in a step or between two.

        The first number counts the changes at home and by forwards of this step. The second part tells where and how
        the data lies.
        """
        if self.layout.is_compound:
            at_home = self._taken_apart
            return at_home.version + self.writes + self.new_writes, hash(at_home.places)
        # Without further calls: backward asks for every weight.
        host, device = self.host, self.device
        new_writes = 0 if device is None else device._version - self.device_version
        return host._version + self.writes + new_writes, (host.data_ptr(), host.stride())

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

    def views_in(self, slot: DeviceSlot) -> list[torch.Tensor]:
        """Returns `views_of` the bytes of a slot: the same objects every time."""
        views = self.slot_views.get(slot.index)
        if views is None:
            views = self.slot_views[slot.index] = self.views_of(slot.bytes)
        return views

    def are_views_in(self, slot: DeviceSlot, tensors: list[torch.Tensor]) -> bool:
        """Tells whether `tensors` are as `views_in(slot)`: the same memory in the same shapes, strides and dtypes."""
        described = self._described_views.get(slot.index)
        if described is None:
            described = self._described_views[slot.index] = [*map(_described, self.views_in(slot))]
        return [*map(_described, tensors)] == described

    def parts_of(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Returns the plain tensors of `host`, of its stand-in or of another tensor like it.

        To take a tensor apart runs much code of its class. So those of `host` are kept until `forget_parts`, or until
        it gets others.
        """
        if not self.layout.is_compound:
            return [tensor]
        if tensor is self.host:
            return self._taken_apart.parts
        return self._device_taken_apart.parts if tensor is self.device else parts(tensor)

    def forget_parts(self) -> None:
        """Takes `host` apart anew from now on, where its user may have given it other parts that nothing shows."""
        if self._host_parts is not None and not self._host_parts.shows_parts:
            self._host_parts = None

    @property
    def _taken_apart(self) -> TakenApart:
        taken = self._host_parts
        if taken is None or taken.tensor is not self.host or not taken.is_current:
            taken = self._host_parts = TakenApart(self.host)
        return taken

    @property
    def _device_taken_apart(self) -> TakenApart:
        if self._device_parts is None or self._device_parts.tensor is not self.device:
            self._device_parts = TakenApart(self.device)
        return self._device_parts

    def device_parts_now(self) -> list[torch.Tensor]:
        """Returns the parts of `device`, to which code may have given others since they were last asked for."""
        if not self._device_taken_apart.is_current or not self._device_parts.shows_parts:
            self._device_parts = TakenApart(self.device)
        return self._device_parts.parts

    def keep_stand_in(self, slot: DeviceSlot, stand_in: torch.Tensor) -> None:
        """Keeps a stand-in, which consists of several tensors in `slot`, for the next use of the unit there."""
        taken = self._device_taken_apart if stand_in is self.device else TakenApart(stand_in)
        if taken.shows_parts:
            self._stand_ins[slot.index] = taken, taken.places, self._taken_apart

    def kept_stand_in(self, slot: DeviceSlot) -> torch.Tensor | None:
        """Returns that of an earlier window, if neither it nor `host` has got other attributes, parts or data since."""
        kept = self._stand_ins.get(slot.index)
        if kept is None:
            return None
        taken, places, at_home = kept
        if at_home is not self._taken_apart or not taken.is_current or taken.places != places:
            del self._stand_ins[slot.index]
            return None
        if taken.tensor is self.device or self.device is None:
            self._device_parts = taken
        return taken.tensor

    def note_installed(self) -> None:
        """Notes the version counter of `device`, which counts from now on."""
        self.device_version = self._version_of(self.device) if self.layout.is_compound else self.device._version

    def count_writes(self) -> bool:
        """Adds to `writes` the changes to `device` that are not in it yet. Returns True if there are any."""
        if not self.layout.is_compound and self.device._version == self.device_version:
            return False
        new_writes = self.new_writes
        self.writes += new_writes
        self.device_version += new_writes
        return new_writes > 0

    def _version_of(self, tensor: torch.Tensor) -> int:
        if not self.layout.is_compound:
            return tensor._version
        return (self._taken_apart if tensor is self.host else self._device_taken_apart).version

    @property
    def is_home(self) -> bool:
        """True if the data of the host tensor is at home: its user has not given it other data.

        The same memory in another order, as `weight.data.t()` is, is other data.
        """
        if not self.layout.is_compound:
            host, nothing = self.host, not self.home or not self.nbytes
            return nothing or (host.data_ptr() == self.home[0] and host.stride() == self.strides)
        return not self.home or self._taken_apart.places == self._home_places

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
        if len(now) > 1 and any(isinstance(tensor, nn.Parameter) for tensor in now.values()):
            raise RuntimeError(
                f"{self.name} was replaced in one place and not in all that share it; detach the mode before that, and"
                " attach it again"
            )
        if len(now) > 1 or not isinstance(new, nn.Parameter):
            raise self.is_gone()
        self.check_data(new, home)
        self.host = new

    def is_gone(self) -> RuntimeError:
        """Returns the error for a parameter that its module does not hold any more."""
        return RuntimeError(
            f"{self.name} is no longer a parameter of its module: it was pruned, parametrized or deleted; detach the"
            " mode before that, and attach it again"
        )

    def make_gradient(self, memory: torch.Tensor) -> None:
        """Gives the gradient host memory: uint8 with a storage of its own, so that its users can be counted."""
        self.gradient = self.gradient_over(memory)

    def gradient_over(self, memory: torch.Tensor) -> torch.Tensor:
        """Returns a gradient over `memory`, uint8, of this tensor's shape, strides and dtype."""
        # `.data` has a version counter of its own, which shows whether this gradient was changed.
        return self.layout.pieces[0].over(memory).data

    def leaves_to_autograd(self, gradient: torch.Tensor) -> bool:
        """Tells whether autograd gets this gradient in host memory, and accumulates it there itself.

        Hooks run on the host, where they were registered, and autograd accumulates what they return. Where a loss uses
        the weight on the host, autograd adds that gradient first, and then the sum to the earlier. It also joins sparse
        gradients, whose bytes are not known before, converts gradients of other dtypes, and keeps the graph of those
        of `create_graph`.
        """
        host, earlier = self.host, self.host.grad
        return bool(
            any(gradient_hooks(host))
            or (self.meets_host_gradient and earlier is not None)
            or gradient.requires_grad
            or gradient.layout is not torch.strided
            or (earlier is not None and (earlier.layout is not torch.strided or earlier.dtype is not gradient.dtype))
        )

    def __str__(self) -> str:
        return f"host gradient of {self.name}"


def _described(tensor: torch.Tensor) -> tuple:
    """Returns what tells two views of the same memory apart."""
    place = tensor.data_ptr(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
