"""Limits of this process: memory and cores of the host, and the memory of a device.

On Linux the control groups (version 2) that hold this process, a container's, a job's of SLURM, a unit's of systemd,
lie one inside the other, and the limits of all of them bind.
"""

from __future__ import annotations

import math
import os
from contextlib import suppress
from pathlib import Path

import torch

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")
SYSTEM_MEMORY = Path("/proc/meminfo")


def usable_host_bytes() -> int | None:
    """Returns the host memory that this process may use: the machine's, or the least limit of its control groups.

    Returns None where neither is known, as on macOS.
    """
    limits = _of_the_system("MemTotal")
    for group in control_groups():
        # "max" is no limit.
        with suppress(OSError, ValueError):
            limits.append(int((group / "memory.max").read_text()))
    return min(limits, default=None)


def free_host_bytes(enough: float = math.inf) -> int | None:
    """Returns how many bytes this process can still allocate: the least that the system and its control groups allow.

    Cached files count as free, because the system drops them first. Where `enough` is free without them they are left
    out: to sum them up takes milliseconds while memory is being allocated. Returns None where neither is known.
    """
    limits = _of_the_system("MemAvailable")
    for group in control_groups():
        with suppress(OSError, ValueError):
            left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
            limits.append(left)
            if left < enough:
                fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
                limits[-1] += int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0))
    return min(limits, default=None)


def usable_cores() -> int:
    """Returns how many cores this process may use, at least 1.

    That is the number of its affinity, and at most the least quota of its control groups. macOS has neither; there it
    is the number of the machine's cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups():
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the bytes that new tensors can take on `device`; None on a device that is not a GPU.

    They are the device's free memory, and the memory that torch's allocator holds for nobody.
    """
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def control_groups() -> list[Path]:
    """Returns the directories of the control groups that hold this process, from the outermost to the innermost.

    A directory may be missing: in a container the system may name the groups of its host.
    """
    inner = ""
    with suppress(OSError):
        lines = OWN_GROUPS.read_text().splitlines()
        inner = next((line.removeprefix("0::/") for line in lines if line.startswith("0::/")), "")
    parts = Path(inner).parts
    return [ROOT.joinpath(*parts[:depth]) for depth in range(len(parts) + 1)]


def _of_the_system(field: str) -> list[int]:
    with suppress(OSError, ValueError, KeyError, IndexError):
        fields = dict(line.split(":") for line in SYSTEM_MEMORY.read_text().splitlines())
        return [int(fields[field].split()[0]) * 1024]
    return []
