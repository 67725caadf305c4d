"""The bytes of host memory that this process may use, and those that are still free for it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from offload.memory.control_groups import control_groups

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


def free_host_bytes() -> int | None:
    """Returns how many bytes this process can still allocate: the least that the system and its control groups allow.

    Cached files count as free, because the system drops them first. Returns None where neither is known.
    """
    limits = _of_the_system("MemAvailable")
    for group in control_groups():
        with suppress(OSError, ValueError):
            left = int((group / "memory.max").read_text()) - int((group / "memory.current").read_text())
            fields = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            limits.append(left + int(fields.get("active_file", 0)) + int(fields.get("inactive_file", 0)))
    return min(limits, default=None)


def _of_the_system(field: str) -> list[int]:
    with suppress(OSError, ValueError, KeyError, IndexError):
        fields = dict(line.split(":") for line in SYSTEM_MEMORY.read_text().splitlines())
        return [int(fields[field].split()[0]) * 1024]
    return []
