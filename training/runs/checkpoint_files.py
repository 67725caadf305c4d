"""The folders of checkpoints in a run's directory, and the files of each."""

import os
import re
from itertools import count
from pathlib import Path

from training.errors import UserError
from training.runs.files import CHECKPOINTS_FOLDER, PARTIAL_SUFFIX

MANIFEST_FILE = "manifest.json"
STATE_FILE = "state.json"
RANDOM_FILE = "random.safetensors"
HUGGING_FACE_FILE = "config.json"
# The origin of the frozen base, where a run trains an adapter.
BASE_FILE = "base.json"
# The files of weights and of optimizer states are WEIGHTS_STEM.safetensors or WEIGHTS_STEM-00001-of-00002.safetensors.
WEIGHTS_STEM = "model"
# The files of an adapter have the names that peft gives them.
ADAPTER_STEM = "adapter"
OPTIMIZER_STEM = "optimizer"
# The averages of what trains, under the names that it has in the files of weights.
EMA_STEM = "ema"
# The names of the files from which a model is filled begin so.
MODEL_FILES = (WEIGHTS_STEM, ADAPTER_STEM, BASE_FILE, EMA_STEM)
# Beside the folders of checkpoints: a link to that of the best.
BEST_LINK = "best"
# A run that resumes from an earlier checkpoint renames later ones to this.
SET_ASIDE_SUFFIX = ".aside"


def folder_of(run_dir: Path, step: int) -> Path:
    """Returns the folder of the checkpoint after `step` steps."""
    return run_dir / CHECKPOINTS_FOLDER / f"step-{step:08d}"


def step_of(folder: Path) -> int | None:
    """Returns the step in a checkpoint's name, None for other names."""
    match = re.fullmatch(r"step-(\d{8,18})", folder.name)
    return int(match[1]) if match else None


def followed(path: Path) -> Path:
    """Returns the checkpoint to which `path` leads, if it is the link to the best one; else `path`."""
    return path.parent / path.readlink() if path.name == BEST_LINK and path.is_symlink() else path


def checkpoints_in(folder: Path) -> list[Path]:
    """Finds the complete checkpoints in `folder`, the newest first; the folder may be missing."""
    if not folder.is_dir():
        return []
    found = [entry for entry in folder.iterdir() if step_of(entry) is not None and entry.is_dir()]
    return sorted(found, key=step_of, reverse=True)


def refuse_run(key: str, given: str, path: Path) -> None:
    """Raises UserError if `path`, given for `key`, is the directory of a run: one of its checkpoints is wanted."""
    if found := checkpoints_in(path / CHECKPOINTS_FOLDER):
        newest = f"{given.rstrip('/')}/{CHECKPOINTS_FOLDER}/{found[0].name}"
        raise UserError(f"{key}={given}: is the directory of a run: give one of its checkpoints, {key}={newest}")


def free_aside(folder: Path) -> Path:
    """Returns a free name beside `folder` to set it aside under: a run may be rewound any number of times."""
    names = (folder.name + SET_ASIDE_SUFFIX + (f"-{number}" if number > 1 else "") for number in count(1))
    return next(path for path in map(folder.with_name, names) if not os.path.lexists(path))


def partials_in(folder: Path) -> list[Path]:
    """Finds the leftovers of interrupted saves and removals in `folder`."""
    return sorted(folder.glob(f"step-*{PARTIAL_SUFFIX}"))
