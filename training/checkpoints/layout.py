"""Where checkpoints lie in a run's directory, and which files each has."""

import os
import re
from itertools import count
from pathlib import Path

CHECKPOINTS_FOLDER = "checkpoints"
MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
CONFIG_FILE = "config.yaml"
RANDOM_FILE = "random.safetensors"
# The stem of one or several files; those of the weights have Hugging Face's names.
OPTIMIZER_STEM = "optimizer"
# Of a folder that is being written or removed, and of a checkpoint that a rewound run has left behind.
PARTIAL_SUFFIX = ".partial"
SET_ASIDE_SUFFIX = ".aside"


def folder_of(run_dir: Path, step: int) -> Path:
    """The folder of the checkpoint after `step` steps."""
    return run_dir / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """The step in a checkpoint's name, None for other names."""
    match = re.fullmatch(r"step-(\d{8,18})", folder.name)
    return int(match[1]) if match else None


def checkpoints_in(folder: Path) -> list[Path]:
    """The complete checkpoints in `folder`, the newest first; the folder may be missing."""
    if not folder.is_dir():
        return []
    found = [entry for entry in folder.iterdir() if step_of(entry) is not None and entry.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def free_aside(folder: Path) -> Path:
    """A name beside `folder` to set it aside under, which nothing has: a run may be rewound any number of times."""
    names = (folder.name + SET_ASIDE_SUFFIX + (f"-{number}" if number > 1 else "") for number in count(1))
    return next(path for path in map(folder.with_name, names) if not os.path.lexists(path))


def partials_in(folder: Path) -> list[Path]:
    """What saves and removals that did not end have left in `folder`."""
    return sorted(folder.glob(f"step-*{PARTIAL_SUFFIX}"))
