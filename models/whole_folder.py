"""Writes a folder that is complete or not there, even after a power failure or a kill."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

Write = Callable[[bytes | memoryview], object]
Fill = Callable[[Write], object]
"""gets a `write` and calls it with the bytes of a file, from first to last"""

PARTIAL_SUFFIX = ".partial"
# Some network and FUSE file systems cannot flush folders. Files are flushed all the same.
CANNOT_FLUSH_FOLDERS = {errno.EINVAL, errno.ENOTSUP, errno.EBADF}


def bytes_of(content: bytes) -> Fill:
    """Returns what fills a file with `content`."""
    return lambda write: write(content)


def refuse_present(folder: Path) -> None:
    """Raises ValueError if `folder` is there and not empty, or something of its temporary name is there."""
    partial = _partial(folder)
    if os.path.lexists(partial):
        raise ValueError(f"{partial} is there: another program writes it now, or was killed: then remove it")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise ValueError(f"{folder} is not a folder: give a new one")
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"{folder} is not empty: give a new folder")


def write_whole_folder(folder: Path, files: Mapping[str, Fill]) -> None:
    """Writes `files`, by name, to `folder`, which is new or empty.

    They are written to FOLDER.partial, flushed to the disk one by one, and the folder is renamed at the end. An error
    or an interrupt leaves nothing; a process that is killed leaves the partial folder.

    Raises:
        ValueError: as `refuse_present`. Nothing has been written then.
        OSError: the disk is full, or the folder cannot be written.
    """
    refuse_present(folder)
    partial = _partial(folder)
    with renamed_when_whole(partial, folder):
        for name, fill in files.items():
            write_file(partial / name, fill)


@contextmanager
def renamed_when_whole(partial: Path, folder: Path) -> Iterator[None]:
    """Makes the folder `partial`, and renames it to `folder` after the block, which writes its files with `write_file`.

    An error or an interrupt in the block removes it. Raises OSError.
    """
    # The names of the folders above, of which some are new, are to outlive a power failure too.
    above = [folder.parent, *(parent.parent for parent in folder.parents if not parent.exists())]
    partial.mkdir(parents=True)
    try:
        yield
        flush_names(partial)
        # It takes the place of an empty folder.
        partial.rename(folder)
        for parent in above:
            flush_names(parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def _partial(folder: Path) -> Path:
    # The name of "." is empty, and ".." has none.
    whole = folder.resolve()
    return whole.with_name(whole.name + PARTIAL_SUFFIX)


def write_file(path: Path, fill: Fill) -> None:
    """Writes a new file and flushes it to the disk. Raises OSError."""
    with open(path, "xb") as file:
        fill(file.write)
        file.flush()
        os.fsync(file.fileno())
        # Otherwise the system would keep a copy of the whole model in memory, as cache of these files.
        if hasattr(os, "posix_fadvise"):
            with suppress(OSError):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def flush_names(folder: Path) -> None:
    """Flushes the names in a folder to the disk, where the file system can do that. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in CANNOT_FLUSH_FOLDERS:
            raise
    finally:
        os.close(descriptor)
