"""Memory of the host that several processes of one user map.

It is an anonymous file in memory (`memfd_create`) which the first process makes and the others open through
`/proc/PID/fd`. So it has no name that anybody could guess or that could be left behind, the size of /dev/shm does not
limit it, and it is gone with the last process that maps it, however that ends. Its mode is 0600.
"""

from __future__ import annotations

import mmap
import os
from contextlib import ExitStack

from offload.sharing.sharers import OWN_HOMES, Sharers, meet


class SharedMemory:
    """A mapping of such a file, handed out from its start. Processes that take the same sizes get the same bytes."""

    def __init__(self, mapping: mmap.mmap):
        self.mapping = mapping
        self._whole = memoryview(mapping)
        self._taken = 0

    def take(self, nbytes: int) -> memoryview:
        """Returns the next `nbytes`, from the start of a page; they keep the mapping alive.

        Raises MemoryError where fewer are left.
        """
        start, end = self._taken, self._taken + nbytes
        if end > len(self._whole):
            raise MemoryError(f"{nbytes} bytes of shared memory are needed, {len(self._whole) - start} are left")
        self._taken = start + in_pages(nbytes)
        return self._whole[start:end]


def in_pages(nbytes: int) -> int:
    """Returns the bytes that `SharedMemory.take(nbytes)` uses up: whole pages, because pages are locked one by one."""
    return -(-max(nbytes, 1) // mmap.PAGESIZE) * mmap.PAGESIZE


def share_memory(sharers: Sharers, nbytes: int) -> SharedMemory:
    """Returns `nbytes` of zeros that all sharers map. Every sharer calls it, and waits for the others.

    Memory is taken page by page, at its first use. Raises RuntimeError in one line where a sharer asks for another
    size, or may not open the file of the first.
    """
    nbytes = max(nbytes, 1)
    with ExitStack() as closing:
        descriptor = 0
        if sharers.rank == 0:
            descriptor = _made(nbytes)
            closing.callback(os.close, descriptor)
        own = (os.getpid(), descriptor, nbytes)
        (process, first, wanted), *_ = found = sharers.exchange(own, "sharing host memory", patient=True)
        for rank, (_, _, theirs) in enumerate(found):
            if theirs != wanted:
                raise RuntimeError(f"rank {rank} shares {theirs} bytes, rank 0 {wanted}: they have not the same model")
        if sharers.rank != 0:
            descriptor = _opened(process, first)
            closing.callback(os.close, descriptor)
        memory = SharedMemory(mmap.mmap(descriptor, nbytes, mmap.MAP_SHARED))
        # Until then the first keeps its descriptor open.
        meet(sharers, "sharing host memory")
        return memory


def _made(nbytes: int) -> int:
    descriptor = os.memfd_create("homes", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(process: int, descriptor: int) -> int:
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"the memory of rank 0 (process {process}) cannot be opened ({error.strerror}): {OWN_HOMES}"
        ) from error
