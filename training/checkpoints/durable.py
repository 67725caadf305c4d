"""Writes and removes folders so that they are complete or not there, even after a power failure or a kill."""

import errno
import functools
import hashlib
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from threading import Event

from models.whole_folder import Fill, Write, bytes_of, renamed_when_whole, write_file
from training.runs.checkpoint_files import MANIFEST_FILE
from training.runs.files import partial_path
from training.runs.manifest import FileRecord, manifest_text, side_by_side


def write_folder(folder: Path, files: Mapping[str, Fill]) -> int:
    """Writes `folder` with `files` and a manifest of them; returns the bytes written.

    `files` maps each name to a function, which gets a `write` and calls it with the file's bytes. All files are written
    to `FOLDER.partial`, several at a time from threads, and the folder is renamed when everything is on disk. An
    interrupt or an error leaves nothing; a process that is killed leaves the partial folder.

    Raises OSError if the disk is full, the folder's name is taken, or the folder cannot be written.
    """
    if os.path.lexists(folder):
        raise FileExistsError(errno.EEXIST, "something of this name is there: move it away", str(folder))
    partial = partial_path(folder)
    given_up = Event()
    with renamed_when_whole(partial, folder):
        writers = [functools.partial(_write_file, partial / name, fill, given_up) for name, fill in files.items()]
        records = dict(zip(files, side_by_side(writers, given_up), strict=True))
        manifest = manifest_text(records).encode()
        _write_file(partial / MANIFEST_FILE, bytes_of(manifest), given_up)
    return sum(record.nbytes for record in records.values()) + len(manifest)


def remove_folder(folder: Path) -> None:
    """Removes a complete folder. It is renamed first, so that no reader sees a part of it. Raises OSError."""
    partial = partial_path(folder)
    folder.rename(partial)
    remove_leftover(partial)


def remove_leftover(path: Path) -> None:
    """Removes what is at `path`: a folder with its content, a file, or a link, but never the target of a link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _write_file(path: Path, fill: Fill, given_up: Event) -> FileRecord:
    digest = hashlib.sha256()
    nbytes = 0

    def recorded(write: Write) -> None:
        def write_piece(data: bytes | memoryview) -> None:
            nonlocal nbytes
            if given_up.is_set():
                raise InterruptedError(f"{path} was given up")
            write(data)
            digest.update(data)
            nbytes += len(data)

        fill(write_piece)

    write_file(path, recorded)
    return FileRecord(nbytes, digest.hexdigest())
