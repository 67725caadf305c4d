"""Folders that appear on disk complete or not at all, whenever power or process end."""

import errno
import hashlib
import os
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from threading import Event

from training.checkpoints.layout import MANIFEST_FILE, PARTIAL_SUFFIX
from training.checkpoints.manifest import THREADS, FileRecord, manifest_text

Write = Callable[[bytes | memoryview], object]


def write_folder(folder: Path, files: Mapping[str, Callable[[Write], object]]) -> int:
    """Makes `folder` of `files`, each by name a function that hands its bytes to the one it is given; returns bytes.

    Files and a manifest of them are written to `FOLDER.partial`, which is renamed when all is on disk. Several are
    written at a time, from threads of their own. An interrupt or an error leaves nothing; a process that is killed
    leaves the partial folder.

    Raises OSError: the disk is full, something has the folder's name, or it cannot be written.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, "something of this name is there: move it away", str(folder))
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    partial.mkdir(parents=True)
    given_up = Event()
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            try:
                futures = {
                    name: pool.submit(_write_file, partial / name, fill, given_up) for name, fill in files.items()
                }
                records = {name: future.result() for name, future in futures.items()}
            except BaseException:
                given_up.set()
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        manifest = manifest_text(records).encode()
        _write_file(partial / MANIFEST_FILE, lambda write: write(manifest), given_up)
        sync_folder(partial)
        partial.rename(folder)
        sync_folder(folder.parent)
    except (OSError, KeyboardInterrupt):
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return sum(record.nbytes for record in records.values()) + len(manifest)


def remove_folder(folder: Path) -> None:
    """Removes a complete folder; one that is removed in part has a partial's name. Raises OSError."""
    partial = folder.with_name(folder.name + PARTIAL_SUFFIX)
    folder.rename(partial)
    remove_leftover(partial)


def remove_leftover(path: Path) -> None:
    """Removes whatever lies at `path`: a folder and all in it, a file, a link but never what it leads to."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def sync_folder(folder: Path) -> None:
    """Makes the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _write_file(path: Path, fill: Callable[[Write], object], given_up: Event) -> FileRecord:
    digest = hashlib.sha256()
    nbytes = 0

    def write(data: bytes | memoryview) -> None:
        nonlocal nbytes
        if given_up.is_set():
            raise InterruptedError(f"{path} was given up")
        file.write(data)
        digest.update(data)
        nbytes += len(data)

    with open(path, "xb") as file:
        fill(write)
        file.flush()
        os.fsync(file.fileno())
        # Else a copy of the whole model would stay in memory, as the system's cache of these files.
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return FileRecord(nbytes, digest.hexdigest())
