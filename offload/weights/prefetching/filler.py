"""Brings units home and into slots. `Filler` is the core's own: a block of host memory for each unit, one copy in.

Extensions override what they do in another way: units that stay in files (`offload.files.file_filler`), homes that
several processes share (`offload.sharing.gather_filler`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from offload.memory.device_slots import DeviceSlot
from offload.memory.host_memory import HostArena
from offload.streams.counters import Counters
from offload.streams.transfer import Transfer
from offload.weights.gradients.landing import GradientLanding
from offload.weights.gradients.seams import NO_UPDATES, Updates
from offload.weights.units.partition import CutModel
from offload.weights.units.unit import OffloadUnit, UnitTensor


class Forecast(NamedTuple):
    """The units that will be used, by index: the next ones, those of the next step, and those that are in slots now."""

    upcoming: Callable[[int], Sequence[int]]
    next_step: Sequence[int]
    held: Sequence[int]
    slots: int


class Filler:
    """The homes of an attached model's units, in the arena `homes`, and the copies from there into slots.

    `slot_bytes` are those that a slot needs. `updates` is asked before a unit is copied in.
    """

    follows_uses = False
    """True: `note_use` is called before each fetch of a step, and `look_ahead` after each fetch"""
    has_gradient_homes = True
    """False: gradients have no memory of their own at home, unless one needs it"""

    def __init__(self, cut: CutModel, transfer: Transfer, arena: HostArena, gradient_bytes: int):
        """`gradient_bytes` are those of the gradients on the host.

        Raises MemoryError, before anything is allocated, where the host has no room.
        """
        self.updates: Updates = NO_UPDATES
        self._arena = arena
        self._transfer, self._streams = transfer, transfer.streams
        self.homes, self.slot_bytes = self._make_homes(cut, gradient_bytes)

    def _make_homes(self, cut: CutModel, gradient_bytes: int) -> tuple[HostArena, int]:
        self._arena.require(cut.unit_bytes - cut.fixed_bytes + gradient_bytes)
        return self._arena, cut.largest_unit_bytes

    def allocate_slot(self, nbytes: int) -> torch.Tensor:
        """Returns device memory, uint8."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self._streams.device)

    def bring_home(self, unit: OffloadUnit) -> None:
        """Gives the unit its home, with its values; `unit.put_back` takes it back."""
        unit.bring_home(self.homes)

    def join(self, gradients: GradientLanding, on_device: Sequence[nn.Parameter]) -> None:
        """Ends the attachment. `on_device` are the parameters that stay on the device and train."""

    def close(self) -> None:
        """Gives back everything but the homes' memory, which tensors still view. The device is idle."""
        self.homes.close()

    def counters(self) -> Counters:
        """Returns the host memory of the homes, and what else the filler counts."""
        return Counters(host_pinned_bytes=self._arena.pinned_bytes, host_pageable_bytes=self._arena.pageable_bytes)

    # Of steps and of forwards outside of them.

    def check_changes(self, unit: OffloadUnit) -> None:
        """Raises RuntimeError where the user has changed what may not be changed, since the last step."""

    def begin(self, in_step: bool) -> None:
        """Begins a step, or forwards outside of steps."""

    def note_use(self, unit: OffloadUnit, in_backward: bool) -> None:
        """Takes the use of a unit in a step."""

    def look_ahead(self, forecast: Forecast) -> None:
        """Prepares the units that will be copied in next."""

    def is_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> bool:
        """Tells whether `fill` may come now, ahead of the unit's use, without a wait of the host; `fill` follows."""
        if self.updates.is_pending(unit):
            return False
        self.updates.before_onload(unit)
        return True

    def await_ready(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Blocks the host until `fill` may come, for a use of the unit now."""
        self.updates.before_onload(unit)

    def fill(self, unit: OffloadUnit, slot: DeviceSlot) -> None:
        """Queues the copies of a unit into a slot, which is free as the h2d stream sees it; `slot.ready` ends them."""
        block = unit.weights.bytes
        self._transfer.copy_in(slot.bytes[: block.numel()], block, done=slot.ready, what=unit.name)

    def before_reuse(self, slot: DeviceSlot) -> None:
        """Makes the h2d stream wait for other streams that have filled the slot."""

    def check_written(self, unit: OffloadUnit, tensors: Sequence[UnitTensor]) -> None:
        """Raises RuntimeError where tensors that a forward has changed cannot be copied home."""

    def end_uses(self) -> None:
        """Ends the uses of a step, all of which have been queued."""

    def end_step(self) -> None:
        """Ends a step, also after an error."""

    def abandon_step(self) -> None:
        """Called in a step that fails, before it ends."""
