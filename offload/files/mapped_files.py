"""Files whose bytes are tensors: mapped into memory copy on write, and held to the state in which they were opened.

A mapping takes no memory of its own: the system reads pages from the file when somebody looks at them, and drops them
when it needs the room. A write to such a tensor makes a private copy of the page, and the file stays as it is.
"""

from __future__ import annotations

import errno
import mmap
import os
import weakref
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from offload.torch_private.tensor_parts import parts

# Reads past the page cache begin and end at multiples of it: the largest block that disks have.
DIRECT_BYTES = 4096
# MAP_NORESERVE: else the system would refuse a file larger than memory, as if all of it were to be written.
NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
COPY_ON_WRITE = {"access": mmap.ACCESS_COPY}
if hasattr(mmap, "MAP_PRIVATE"):
    COPY_ON_WRITE = {"flags": mmap.MAP_PRIVATE | NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}

_open: weakref.WeakSet[MappedFile] = weakref.WeakSet()


@dataclass(frozen=True)
class FileSpan:
    """`nbytes` bytes of the file at `path`, from `offset` on: the values of one plain tensor, contiguous."""

    path: Path
    offset: int
    nbytes: int


class ChangedFileError(OSError):
    """A file from which weights are read has changed. `filename` is its path."""


class MappedFile:
    """One file, open for reads, and mapped copy on write. It is closed with the last reference to this object.

    Raises OSError, naming the file, where it cannot be opened or mapped.
    """

    def __init__(self, path: Path):
        # The process may go to another directory, where the name is none, or that of another file.
        self.path = path.absolute()
        self.fd = os.open(path, os.O_RDONLY)
        try:
            self._identity = _identity(os.fstat(self.fd))
            self.nbytes = os.fstat(self.fd).st_size
            if not self.nbytes:
                raise OSError(errno.EINVAL, "is empty: there are no weights in it", str(path))
            self._view = memoryview(mmap.mmap(self.fd, self.nbytes, **COPY_ON_WRITE))
        except BaseException:
            os.close(self.fd)
            raise
        weakref.finalize(self, os.close, self.fd)
        self.start = torch.frombuffer(self._view, dtype=torch.uint8, count=1).data_ptr()
        _open.add(self)

    def view(self, span: FileSpan) -> torch.Tensor:
        """Returns the bytes of `span`, uint8, as a tensor with a storage of its own. The mapping lives as long as it.

        Raises ChangedFileError where the file ends before.
        """
        if span.offset + span.nbytes > self.nbytes:
            raise self._changed(f"has {self.nbytes} bytes and not the {span.offset + span.nbytes} of its header")
        if not span.nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._view, dtype=torch.uint8, count=span.nbytes, offset=span.offset)

    def read(self, memory: memoryview, offset: int, direct: bool = False) -> int:
        """Reads bytes from `offset` on into `memory`, as many as the system gives at once; returns their number.

        `direct`: past the page cache (O_DIRECT), where the file system does that: memory, offset and number are then
        multiples of DIRECT_BYTES, else it is read as usual. Raises OSError, naming the file and the place.
        """
        try:
            if direct and not offset % DIRECT_BYTES and not len(memory) % DIRECT_BYTES and self._direct is not None:
                try:
                    return os.preadv(self._direct, [memory], offset)
                except OSError as error:
                    if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                        raise
            return os.preadv(self.fd, [memory], offset)
        except OSError as error:
            text = f"cannot be read at byte {offset} ({error.strerror}): check the disk"
            raise OSError(error.errno, text, str(self.path)) from error

    @cached_property
    def _direct(self) -> int | None:
        """The file once more, open for reads past the page cache; None where the file system refuses that."""
        try:
            fd = os.open(self.path, os.O_RDONLY | os.O_DIRECT)
        except (OSError, AttributeError):
            return None
        weakref.finalize(self, os.close, fd)
        return fd

    def check(self) -> None:
        """Raises ChangedFileError in one line where the path leads to another file, or to one that was written."""
        try:
            found = os.stat(self.path)
        except FileNotFoundError:
            raise self._changed("was removed") from None
        except OSError as error:
            raise self._changed(f"cannot be found any more ({error.strerror})") from None
        if _identity(found) == self._identity:
            return
        if found.st_size != self.nbytes:
            raise self._changed(f"had {self.nbytes} bytes and has {found.st_size} now")
        raise self._changed("was written or replaced")

    def _changed(self, how: str) -> ChangedFileError:
        text = f"{how} while its weights are read from it: put back the file as it was, and begin again"
        return ChangedFileError(errno.ESTALE, text, str(self.path))

    def __str__(self) -> str:
        return str(self.path)


def lies_in_file(tensor: torch.Tensor) -> bool:
    """Tells whether the values of `tensor` are in a mapped file, where an attached mode has put them."""
    files = list(_open)
    if not files:
        return False
    places = [part.data_ptr() for part in parts(tensor) if part.device.type == "cpu"]
    return bool(places) and all(any(f.start <= place < f.start + f.nbytes for f in files) for place in places)


def _identity(status: os.stat_result) -> tuple[int, ...]:
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
