"""The control groups of Linux (version 2) that hold this process: a container's, a job's of SLURM, a unit's of systemd.

Each lies inside the one before, and the limits of all of them bind.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN_GROUPS = Path("/proc/self/cgroup")


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
