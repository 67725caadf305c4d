"""The number of CPU cores that this process may use."""

from __future__ import annotations

import math
import os
from contextlib import suppress

from offload.memory.control_groups import control_groups


def usable_cores() -> int:
    """Returns how many cores this process may use, at least 1.

    A container or `taskset` may grant fewer cores than the machine has: the number is that of the process's affinity,
    and at most the least quota of its control groups. macOS has neither; there it is the number of the machine's cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for group in control_groups():
        # "max" is no limit.
        with suppress(OSError, ValueError):
            quota, period = (group / "cpu.max").read_text().split()
            cores = min(cores, math.ceil(int(quota) / int(period)))
    return max(cores, 1)
