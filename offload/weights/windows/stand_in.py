"""StandIn: the tensor that stands for a unit's tensor on the device, and what forwards do to it.

A tensor that consists of several (`torch_private.tensor_parts`) has a stand-in for each slot, because to make one runs
much code of its class; a plain parameter has one for all slots.
"""

from __future__ import annotations

import torch

from offload.memory.device_slots import DeviceSlot
from offload.torch_private.tensor_parts import Places, TakenApart
from offload.weights.units.placement import ModuleAttribute
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor


class StandIn:
    """The stand-in of `tensor`. `stand_ins` gives it to modules, and writes its attributes.

    `device` is the tensor on the device, in this step, and `writes` counts the changes that forwards of this step have
    made to it. While a window is open, `installed` are the attributes that hold a tensor of the window, that tensor,
    and what they held before if it was not `tensor.host`; and `own_copy` is the copy of `device` that modules hold in
    its place, for a buffer that may change.

    `joined` and `joined_before` are the stand-ins of a parameter that is one tensor, of this step or of the last. Where
    the parameter trains, the graph of autograd joins the two. `shares` has one for each microbatch, where they run side
    by side.
    """

    def __init__(self, tensor: UnitTensor):
        self.tensor = tensor
        self.device: torch.Tensor | None = None
        self.own_copy: torch.Tensor | None = None
        self.joined: torch.Tensor | None = None
        self.joined_before: torch.Tensor | None = None
        self.shares: dict[int, torch.Tensor] = {}
        self.installed: list[tuple[ModuleAttribute, torch.Tensor, torch.Tensor | None]] = []
        self.writes = 0
        self.counted_version = 0
        """autograd's version counter of `device` when it was installed, or when its changes were last counted"""
        self.slot_views: dict[int, list[torch.Tensor]] = {}
        """what `views_in` has returned, by the index of the slot"""
        self._described_views: dict[int, list[tuple]] = {}
        # Where the tensor consists of several: those of `device`; and of each slot the stand-in there, the places of
        # its parts, and the host tensor for which it was made.
        self._parts: TakenApart | None = None
        self._kept: dict[int, tuple[TakenApart, Places, TakenApart]] = {}

    @property
    def state(self) -> tuple[int, object]:
        """A value that changes when the weight is changed at home, or gets other data, in a step or between two.

        The first number counts the changes at home and by forwards of this step. The second part tells where and how
        the data lies.
        """
        tensor = self.tensor
        if tensor.layout.is_compound:
            at_home = tensor.taken_apart
            new_writes = 0 if self.device is None else self._version - self.counted_version
            return at_home.version + self.writes + new_writes, hash(at_home.places)
        # Without further calls: backward asks for every weight.
        host, device = tensor.host, self.device
        new_writes = 0 if device is None else device._version - self.counted_version
        return host._version + self.writes + new_writes, (host.data_ptr(), host.stride())

    def views_in(self, slot: DeviceSlot) -> list[torch.Tensor]:
        """Returns `tensor.views_of` the bytes of a slot: the same objects every time."""
        views = self.slot_views.get(slot.index)
        if views is None:
            views = self.slot_views[slot.index] = self.tensor.views_of(slot.bytes)
        return views

    def are_views_in(self, slot: DeviceSlot, tensors: list[torch.Tensor]) -> bool:
        """Tells whether `tensors` are as `views_in(slot)`: the same memory in the same shapes, strides and dtypes."""
        described = self._described_views.get(slot.index)
        if described is None:
            described = self._described_views[slot.index] = [*map(_described, self.views_in(slot))]
        return [*map(_described, tensors)] == described

    @property
    def parts(self) -> list[torch.Tensor]:
        """The plain tensors of which `device` consists."""
        return self._taken_apart.parts if self.tensor.layout.is_compound else [self.device]

    @property
    def _taken_apart(self) -> TakenApart:
        if self._parts is None or self._parts.tensor is not self.device:
            self._parts = TakenApart(self.device)
        return self._parts

    def look_at_parts(self) -> list[torch.Tensor]:
        """Returns the parts of `device`, to which code may have given others since they were last asked for."""
        if not self._taken_apart.is_current or not self._parts.shows_parts:
            self._parts = TakenApart(self.device)
        return self._parts.parts

    def keep_for(self, slot: DeviceSlot, made: torch.Tensor) -> None:
        """Keeps `made`, a stand-in that consists of several tensors in `slot`, for the next use of the unit there."""
        taken = self._taken_apart if made is self.device else TakenApart(made)
        if taken.shows_parts:
            self._kept[slot.index] = taken, taken.places, self.tensor.taken_apart

    def kept_for(self, slot: DeviceSlot) -> torch.Tensor | None:
        """Returns that of an earlier window, if neither it nor the host has got other attributes, parts or data."""
        kept = self._kept.get(slot.index)
        if kept is None:
            return None
        taken, places, at_home = kept
        if at_home is not self.tensor.taken_apart or not taken.is_current or taken.places != places:
            del self._kept[slot.index]
            return None
        if taken.tensor is self.device or self.device is None:
            self._parts = taken
        return taken.tensor

    def note_installed(self) -> None:
        """Notes the version counter of `device`, which counts from now on."""
        self.counted_version = self._version

    def count_writes(self) -> bool:
        """Adds to `writes` the changes to `device` that are not in it yet. Returns True if there are any."""
        new_writes = self._version - self.counted_version
        self.writes += new_writes
        self.counted_version += new_writes
        return new_writes > 0

    @property
    def _version(self) -> int:
        return self._taken_apart.version if self.tensor.layout.is_compound else self.device._version


class StandIns(dict[OffloadUnit, list[StandIn]]):
    """The stand-ins of each unit, in the order of its tensors."""

    def __init__(self, units: list[OffloadUnit]):
        super().__init__((unit, [StandIn(tensor) for tensor in unit.tensors]) for unit in units)

    def at(self, unit: OffloadUnit, offset: int) -> StandIn:
        """Returns that of the tensor to which byte `offset` of the unit's flat buffer belongs."""
        return self[unit][unit.index_at(offset)]


def _described(tensor: torch.Tensor) -> tuple:
    """Returns what tells two views of the same memory apart."""
    place = tensor.data_ptr(), tensor.shape, tensor.stride()
    return *place, tensor.dtype, tensor.is_conj(), tensor.is_neg()
