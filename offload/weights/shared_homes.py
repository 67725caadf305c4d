"""Makes the memory in which processes share the homes of a model's units: the weights, and the sums of gradients."""

from __future__ import annotations

import torch

from offload.memory.host_memory import HostArena
from offload.sharing.shared_memory import in_pages, share_memory
from offload.sharing.sharers import Sharers
from offload.weights.units.partition import CutModel
from offload.weights.units.slices import check_divisible, slices_of


def make_shared_homes(cut: CutModel, sharers: Sharers, device: torch.device, pin: bool) -> tuple[HostArena, int]:
    """Returns an arena that all sharers map, and the bytes of a slot, which has a unit and the padding of its slices.

    Every sharer calls it with the same model, and waits for the others. `device` and `pin` are those of `HostArena`.
    Raises ValueError for a parameter that cannot be shared, or that has its home in files, and MemoryError where the
    host has no room.
    """
    for unit in cut.units:
        check_divisible(unit)
    slot_bytes = max((slices_of(unit, sharers.count).padded_bytes for unit in cut.units), default=0)
    if device.type == "meta":
        # A dry run, without memory and alone.
        return HostArena(device), slot_bytes
    if sharers.rank == 0:
        HostArena(device).require(cut.unit_bytes + cut.gradient_bytes)
    sizes = (in_pages(unit.nbytes) + in_pages(unit.gradient_bytes) for unit in cut.units)
    memory = share_memory(sharers, sum(sizes))
    return HostArena(device, pin, memory), slot_bytes
