"""The device of a rank, and its part of its host's cores: those of its GPU's NUMA node.

Copies and updates of a rank then stay on that node's memory. The kernel places a page on the node of the thread that
touches it first, so binding threads places host memory too, if it is done before that memory is allocated. torch's and
Megatron-LM's launchers bind ranks in the same way.
"""

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch

from offload.planning import usable_cores
from training.errors import UserError
from training.parallel.world import World
from training.profiling.hardware import resolve_device

SYSTEM = Path("/sys")
THREADS = Path("/proc/self/task")


def take_seat(name: str, world: World) -> tuple[torch.device, int]:
    """Sets the device of this rank for `device=name`, and its share of the host's cores, near its GPU.

    Returns the device and the number of cores. Raises UserError if the host has fewer GPUs than ranks.
    """
    device = device_of(name, world.local_size, world.local_rank)
    cores = usable_cores() // world.local_size
    if device.type == "cuda":
        cores = min(cores, bind_to_node(gpu_nodes(world.local_size), world.local_rank) or cores)
    return device, share_cores(cores)


def device_of(name: str, local_size: int, local_rank: int) -> torch.device:
    """Returns the CPU, or the GPU with number `local_rank`. Raises UserError if the host has fewer GPUs than ranks."""
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


def gpu_nodes(count: int) -> list[int | None]:
    """Returns the NUMA node of each of the first `count` GPUs; None where the system does not know it."""
    return [_node_of(torch.cuda.get_device_properties(index)) for index in range(count)]


def bind_to_node(nodes: Sequence[int | None], local_rank: int) -> int | None:
    """Binds all threads of this process to those of its cores that lie on its GPU's NUMA node.

    `nodes` are the NUMA nodes of the GPUs of all ranks on this host. Returns the number of cores that are this rank's
    part of its node. It binds nothing and returns None if there is only one rank or one node, if the node of the GPU is
    not known, or if this process may use no core of that node.
    """
    if not hasattr(os, "sched_setaffinity"):
        return None
    allowed = os.sched_getaffinity(0)
    cores_of = {node: cores & allowed for node, cores in _cores_by_node().items()}
    if len(nodes) < 2 or len(cores_of) < 2:
        return None
    cores = cores_of.get(nodes[local_rank])
    if not cores:
        return None
    for thread in os.listdir(THREADS):
        # A thread may end meanwhile.
        with suppress(ProcessLookupError):
            os.sched_setaffinity(int(thread), cores)
    return max(len(cores) // nodes.count(nodes[local_rank]), 1)


def _node_of(gpu: object) -> int | None:
    """Reads the node of the PCI device of `gpu`, torch's properties of it. The kernel writes -1 for one it lacks."""
    try:
        address = f"{gpu.pci_domain_id:04x}:{gpu.pci_bus_id:02x}:{gpu.pci_device_id:02x}.0"
        node = int((SYSTEM / "bus/pci/devices" / address / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None
    return None if node < 0 else node


def _cores_by_node() -> dict[int, set[int]]:
    """Returns the cores of each NUMA node that has some."""
    found = {}
    for folder in (SYSTEM / "devices/system/node").glob("node[0-9]*"):
        with suppress(OSError, ValueError):
            if cores := _numbers((folder / "cpulist").read_text()):
                found[int(folder.name.removeprefix("node"))] = cores
    return found


def _numbers(text: str) -> set[int]:
    """Returns the numbers of a list as the kernel writes it: `0-3,8,10-11`."""
    ranges = [part.partition("-") for part in text.strip().split(",") if part]
    return {number for first, _, last in ranges for number in range(int(first), int(last or first) + 1)}
