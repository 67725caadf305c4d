"""The device of a rank, and its part of its host's cores."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload import usable_cores
from training.errors import UserError
from training.parallel.numa import bind_to_node, gpu_nodes
from training.parallel.world import World
from training.profiling.hardware import resolve_device


@dataclass(frozen=True)
class Seat:
    """The device of a rank, and how many of the host's cores are its own."""

    device: torch.device
    cores: int


def take_seat(name: str, numa: str, world: World) -> Seat:
    """Takes the device of this rank for `device=name`, and its part of the cores.

    With numa=auto the process is bound to the cores of its GPU's NUMA node. Raises UserError if there are too few GPUs.
    """
    device = device_of(name, world.local_size, world.local_rank)
    cores = usable_cores() // world.local_size
    if numa == "auto" and device.type == "cuda":
        cores = min(cores, bind_to_node(gpu_nodes(world.local_size), world.local_rank) or cores)
    return Seat(device, share_cores(cores))


def device_of(name: str, local_size: int, local_rank: int) -> torch.device:
    """Returns the device of a rank for `device=name`, and makes it this process's GPU: that of its number, or the CPU.

    Raises UserError if the host has too few GPUs for its `local_size` ranks.
    """
    device = resolve_device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count < local_size:
        raise UserError(f"devices={local_size}: torch finds {count}: give devices={count}, or device=cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def share_cores(cores: int) -> int:
    """Gives torch's threads of this process at most `cores`, and at least one; returns their number."""
    cores = max(cores, 1)
    torch.set_num_threads(min(torch.get_num_threads(), cores))
    return cores
