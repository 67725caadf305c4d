"""The program that a run ran, and the time: both stand beside its results, with its machine and its command."""

import subprocess
from datetime import datetime
from functools import cache
from pathlib import Path

import torch

SOURCE = Path(__file__).resolve().parents[2]


def provenance() -> dict[str, str]:
    """Returns the version of torch, the date and time with its zone, and the commit of the source, if that is known."""
    facts = {"torch": str(torch.__version__), "date": datetime.now().astimezone().isoformat(timespec="seconds")}
    return facts | ({"commit": known} if (known := commit(SOURCE)) else {})


@cache
def commit(source: Path) -> str | None:
    """Returns the commit of a git checkout, with `-dirty` where its files differ; None if it is none."""
    # Without a .git of its own it may lie in the checkout of another project.
    if not (source / ".git").exists():
        return None
    command = ["git", "-C", str(source), "describe", "--always", "--dirty", "--abbrev=10", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
