"""The manifest of a checkpoint: the size and SHA-256 of each of its files, written with them and verified later."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any, TypeVar

from training.runs import bounded_files
from training.runs.bounded_files import MissingError, UnreadableError
from training.runs.checkpoint_files import MANIFEST_FILE
from training.runs.files import CONFIG_FILE

FORMAT = 2
# Hashing releases Python's lock, so files are hashed in parallel; disks do not gain from more threads.
THREADS = 4
PIECE_BYTES = 2**24

T = TypeVar("T")


class DamagedError(Exception):
    """A checkpoint cannot be used; the message is one line that names the file and the reason."""


@dataclass(frozen=True)
class FileRecord:
    """The size and the hash of a file when it was written."""

    nbytes: int
    sha256: str


def manifest_text(files: Mapping[str, FileRecord]) -> str:
    """Returns the content of a manifest of `files`, by name."""
    return json.dumps({"format": FORMAT, "files": {name: asdict(record) for name, record in files.items()}}, indent=2)


def read_manifest(folder: Path) -> dict[str, FileRecord]:
    """Reads which files the checkpoint in `folder` must have, by name; the files themselves are not read.

    Raises DamagedError if the manifest is missing or is not one, or names a file that is not in this folder.
    """
    path = folder / MANIFEST_FILE
    with damage_of(path):
        content = bounded_files.read_bytes(path)
        manifest = bounded_files.json_object(content)
    if manifest.get("format") != FORMAT:
        raise DamagedError(f"{path} has format {manifest.get('format')!r}: this version reads only format {FORMAT}")
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise DamagedError(f"{path} lists no files")
    records = {name: _record(path, name, entry) for name, entry in files.items()}
    # The manifest is in no list of hashes; its own text is known to the byte.
    if content != manifest_text(records).encode():
        raise DamagedError(f"{path} is not what was written: it has more, or in another form, than its list of files")
    return records


def verify(folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Reads and hashes all files. Raises DamagedError naming the first that is missing, or has another size or hash."""
    for name, record in files.items():
        path = folder / name
        with damage_of(path), bounded_files.opened(path) as file:
            nbytes = os.fstat(file.fileno()).st_size
        if nbytes != record.nbytes:
            raise DamagedError(f"{path} has {nbytes} bytes where {record.nbytes} were written")
    digests = side_by_side([partial(sha256_of_file, folder / name) for name in files])
    for (name, record), digest in zip(files.items(), digests, strict=True):
        if digest != record.sha256:
            raise DamagedError(f"{folder / name} is not what was written: its SHA-256 differs")


def side_by_side(functions: Sequence[Callable[[], T]], given_up: Event | None = None) -> list[T]:
    """Calls the functions in THREADS threads, and returns their results in order.

    The first error, or an interrupt, sets `given_up`, which running functions may look at, and is raised when they have
    returned; those that have not begun are left out.
    """
    with ThreadPoolExecutor(THREADS) as pool:
        try:
            return list(pool.map(lambda function: function(), functions))
        except BaseException:
            if given_up is not None:
                given_up.set()
            raise


def read_json(path: Path) -> dict[str, Any]:
    """Reads a file with one JSON object. Raises DamagedError if it is anything else."""
    with damage_of(path):
        return bounded_files.read_json(path)


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the configuration of the checkpoint in `folder`; every value is read as text, nothing is instantiated.

    Raises DamagedError if the file is not a configuration.
    """
    path = folder / CONFIG_FILE
    with damage_of(path):
        return bounded_files.read_yaml(path)


@contextmanager
def damage_of(path: Path) -> Iterator[None]:
    """Surrounds code that reads `path`; turns an error of reading into a DamagedError that names the file."""
    try:
        yield
    except MissingError:
        raise DamagedError(f"{path} is missing") from None
    except UnreadableError as error:
        raise DamagedError(f"{path}: {error}") from None
    except OSError as error:
        raise DamagedError(f"{path} cannot be read ({error.strerror})") from None


def _record(path: Path, name: str, entry: Any) -> FileRecord:
    # A checkpoint may come from an untrusted source: no name may lead out of its folder.
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", name) or name == MANIFEST_FILE:
        raise DamagedError(f"{path} names {name!r}, which is not a file of a checkpoint")
    values = entry if isinstance(entry, dict) else {}
    nbytes, digest = values.get("nbytes"), values.get("sha256")
    if type(nbytes) is not int or not isinstance(digest, str):
        raise DamagedError(f"{path} lacks the size or the SHA-256 of {name}")
    return FileRecord(nbytes, digest)


def sha256_of_file(path: Path) -> str:
    """Returns the SHA-256 of a file. Raises DamagedError if it cannot be read."""
    digest = hashlib.sha256()
    piece = memoryview(bytearray(PIECE_BYTES))
    with damage_of(path), bounded_files.opened(path) as file:
        while count := file.raw.readinto(piece):
            digest.update(piece[:count])
    return digest.hexdigest()
