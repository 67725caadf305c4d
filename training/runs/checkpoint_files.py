"""The folders of checkpoints in a run's directory, the files of each, and their manifest.

A manifest has the size and the SHA-256 of each file. It is written with the files, which are verified by it later.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from training.errors import UserError
from training.runs.bounded_files import DamagedError, json_object, opened, read_bytes, read_yaml
from training.runs.files import CHECKPOINTS_FOLDER, CONFIG_FILE, PARTIAL_SUFFIX

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
FORMAT = 2
# Hashing releases Python's lock, so files are hashed in parallel; disks do not gain from more threads.
THREADS = 4

T = TypeVar("T")


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


@dataclass(frozen=True)
class FileRecord:
    """The size and the hash of a file when it was written."""

    nbytes: int
    sha256: str


def manifest_text(files: Mapping[str, FileRecord]) -> str:
    """Returns the content of a manifest of `files`, by name."""
    return json.dumps({"format": FORMAT, "files": {name: asdict(record) for name, record in files.items()}}, indent=2)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Reads which files a checkpoint must have. Raises DamagedError for no manifest, or a path in place of a name."""
    path = folder / MANIFEST_FILE
    content = read_bytes(path)
    manifest = json_object(content, str(path))
    if manifest.get("format") != FORMAT:
        raise DamagedError(f"{path} has format {manifest.get('format')!r}: this version reads only format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise DamagedError(f"{path} lists no files")
    for name in files:
        # A checkpoint may come from an untrusted source: no name may lead out of its folder.
        if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name == MANIFEST_FILE:
            raise DamagedError(f"{path} names {name!r}, which is not a file of a checkpoint")
    # The manifest has no hash of itself; its text must be, byte for byte, what these records give.
    with suppress(TypeError):
        records = {name: FileRecord(**entry) for name, entry in files.items()}
        if content == manifest_text(records).encode():
            return records
    raise DamagedError(f"{path} is not what was written: it has more, or in another form, than its list of files")


def verify(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Reads and hashes all files. Raises DamagedError naming the first that is missing, or has another size or hash."""
    for name, record in files.items():
        path = folder / name
        with opened(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
        if nbytes != record.nbytes:
            raise DamagedError(f"{path} has {nbytes} bytes where {record.nbytes} were written")
    digests = side_by_side([partial(sha256_of_file, folder / name) for name in files])
    for (name, record), digest in zip(files.items(), digests, strict=True):
        if digest != record.sha256:
            raise DamagedError(f"{folder / name} is not what was written: its SHA-256 differs")


def side_by_side(functions: Sequence[Callable[[], T]], given_up: Event | None = None) -> list[T]:
    """Calls functions in THREADS threads and returns their results; sets `given_up` and raises if one raises."""
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            return list(pool.map(lambda function: function(), functions))
        except BaseException:
            if given_up is not None:
                given_up.set()
            raise


def read_config(folder: Path) -> dict[str, Any]:
    """Reads a checkpoint's configuration, every value as text. Raises DamagedError if the file is no configuration."""
    return read_yaml(folder / CONFIG_FILE)


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises DamagedError if it cannot be read."""
    with opened(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
