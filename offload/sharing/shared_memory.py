"""Memory of the host that several processes of one user map, and exchanges of a few numbers through it.

Each process makes a part of it, an anonymous file in memory (`memfd_create`), which the others open through
`/proc/PID/fd`. So it has no name that anybody could guess or that could be left behind, the size of /dev/shm does not
limit it, and it is gone with the last process that maps it, however that ends. The mode of the files is 0600.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
import zlib
from array import array
from collections.abc import Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from threading import Thread

from offload.memory.host_memory import HUGE_PAGE_BYTES, POPULATING_THREADS, populate
from offload.sharing.sharers import OWN_HOMES, Processes, Sharers

# Of Linux; Python's module lacks it.
MAP_FIXED = 0x10
WORD_BYTES = 8
# Of a row of an ExchangeBoard: the number of the exchange, how many numbers there are, the numbers, the checksum. Two
# cache lines of most processors.
ROW_WORDS = 16
MOST_NUMBERS = ROW_WORDS - 3


class SharedMemory:
    """A mapping of such files, handed out from byte `start` of it. Processes that take the same sizes get the same.

    `is_made`: all pages are there, and not merely promised.
    """

    def __init__(self, mapping: mmap.mmap, start: int, nbytes: int, is_made: bool):
        self.mapping, self.is_made = mapping, is_made
        self._whole = memoryview(mapping)[start : start + nbytes]
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


class PagesAhead:
    """Makes this process's part of `nbytes` that `sharers` will share next, in threads, beside other work.

    Nobody waits for the other sharers before `share_memory` takes it.
    """

    def __init__(self, sharers: Sharers, nbytes: int):
        self.nbytes = nbytes
        part, mapped = _sizes(sharers, nbytes)
        self._file: int | None = _made(mapped)
        # Threads of its own: who locks pages meanwhile would wait for all of these.
        self._threads = ThreadPoolExecutor(POPULATING_THREADS, "pages ahead")
        self._started = Thread(target=self._make, args=(self._file, part, mapped, sharers.rank), daemon=True)
        self._started.start()

    def take(self) -> int:
        """Waits until the pages are there. Returns the file that has them, which the caller closes."""
        self._started.join()
        self._threads.shutdown()
        file, self._file = self._file, None
        return file

    def close(self) -> None:
        """Makes no more pages, and gives those back that nobody has taken."""
        self._threads.shutdown(cancel_futures=True)
        if self._file is not None:
            os.close(self.take())

    def _make(self, file: int, part: int, mapped: int, rank: int) -> None:
        mapping, start = _mapped(file, mapped)
        address = _map_over(mapping, start, file, rank * part, part)
        # `close` has cancelled the rest.
        with suppress(CancelledError, RuntimeError):
            populate(address, part, in_file=True, threads=self._threads)


def share_memory(sharers: Sharers, nbytes: int, ahead: PagesAhead | None = None) -> SharedMemory:
    """Returns `nbytes` of zeros that all sharers map. Every sharer calls it, and waits for the others.

    Each makes the pages of one part: the system makes those of one file one after the other. Large parts have huge
    pages, a tenth of the time to make and a quarter to page-lock. `ahead` has made as many bytes already. Raises
    RuntimeError where a sharer asks for another size, or may not open the file of another, and MemoryError where no
    addresses are left.
    """
    part, mapped = _sizes(sharers, nbytes)
    with ExitStack() as closing:
        # Each file is as long as the mapping, and has pages in one part only.
        own = _made(mapped) if ahead is None else ahead.take()
        closing.callback(os.close, own)
        found = sharers.exchange((os.getpid(), own, nbytes), "sharing host memory", patient=True)
        wanted = found[0][2]
        for rank, (_, _, theirs) in enumerate(found):
            if theirs != wanted:
                raise RuntimeError(f"rank {rank} shares {theirs} bytes, rank 0 {wanted}: they have not the same model")
        mapping, start = _mapped(own, mapped)
        addresses = []
        for rank, (process, theirs, _) in enumerate(found):
            descriptor = own
            if rank != sharers.rank:
                descriptor = _opened(rank, process, theirs)
                closing.callback(os.close, descriptor)
            addresses.append(_map_over(mapping, start, descriptor, rank * part, part))
        made = populate(addresses[sharers.rank], part, in_file=True)
        # Until then each keeps its descriptor open.
        found = sharers.exchange((made,), "sharing host memory", patient=True)
        return SharedMemory(mapping, start, part * sharers.count, is_made=all(made for (made,) in found))


def _sizes(sharers: Sharers, nbytes: int) -> tuple[int, int]:
    """Returns the bytes of a sharer's part of `nbytes`, and those of the addresses for all parts."""
    part = in_pages(-(-nbytes // sharers.count))
    if part >= HUGE_PAGE_BYTES:
        part = -(-part // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES
    return part, part * sharers.count + HUGE_PAGE_BYTES


def _mapped(file: int, nbytes: int) -> tuple[mmap.mmap, int]:
    """Returns a mapping of a file, and the first byte of it at which a huge page may begin."""
    mapping = mmap.mmap(file, nbytes, mmap.MAP_SHARED)
    return mapping, -_address(mapping) % HUGE_PAGE_BYTES


def _address(mapping: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(mapping))


def _made(nbytes: int) -> int:
    descriptor = os.memfd_create("homes", os.MFD_CLOEXEC)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, nbytes)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _opened(rank: int, process: int, descriptor: int) -> int:
    try:
        return os.open(f"/proc/{process}/fd/{descriptor}", os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise RuntimeError(
            f"the memory of rank {rank} (process {process}) cannot be opened ({error.strerror}): {OWN_HOMES}"
        ) from error


def _map_over(mapping: mmap.mmap, start: int, descriptor: int, offset: int, nbytes: int) -> int:
    """Puts `nbytes` of a file in the place of those at the same offset from byte `start` of `mapping`.

    Returns their address. They end together with that mapping. Raises MemoryError.
    """
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    protection, flags = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED
    address = _address(mapping) + start + offset
    if call(address, nbytes, protection, flags, descriptor, offset) != address:
        raise MemoryError(f"{nbytes} bytes of shared memory cannot be mapped ({os.strerror(ctypes.get_errno())})")
    return address


class ExchangeBoard:
    """Exchanges a few numbers between all `sharers` of a host, who make one at the same time and wait for each other.

    Each process writes to a row of its own and reads those of the others: microseconds, where sockets take a tenth of a
    millisecond. A row has the number of its exchange and a checksum, so one that is being written, or arrives in
    another order, reads as not there yet. Each process has two rows in turn: by the time one is written again all have
    read it. Raises SharerLostError, as `Sharers.exchange` does, if one of them does not come.
    """

    def __init__(self, sharers: Sharers):
        self._rank, self._count = sharers.rank, sharers.count
        nbytes = 2 * self._count * ROW_WORDS * WORD_BYTES
        self._words = share_memory(sharers, nbytes).take(nbytes).cast("q")
        self._processes = Processes(sharers)
        self._exchange = 0

    def exchange(self, numbers: Sequence[int], limit_s: float) -> list[list[int]]:
        """Blocks the host until every sharer has written its numbers; returns those of each, in the order of ranks.

        The numbers are signed, of 64 bits. Raises ValueError for more than MOST_NUMBERS, and SharerLostError for a
        sharer whose process has ended, or that does not come within `limit_s` seconds.
        """
        if len(numbers) > MOST_NUMBERS:
            raise ValueError(f"{len(numbers)} numbers are more than a row of the exchange board has: {MOST_NUMBERS}")
        self._exchange += 1
        row = array("q", (self._exchange, len(numbers), *numbers))
        row.append(zlib.crc32(row))
        start = self._row(self._rank)
        self._words[start : start + len(row)] = row
        began, awaited = time.monotonic(), self._processes.awaited
        return [
            list(numbers) if rank == self._rank else awaited(rank, partial(self._read, rank), began, limit_s)
            for rank in range(self._count)
        ]

    def _row(self, rank: int) -> int:
        return (2 * rank + self._exchange % 2) * ROW_WORDS

    def _read(self, rank: int) -> list[int] | None:
        """Returns the numbers of a rank in this exchange; None if they are not there."""
        start = self._row(rank)
        if self._words[start] != self._exchange:
            return None
        row = array("q", self._words[start : start + ROW_WORDS])
        end = 2 + row[1]
        if not 2 <= end < ROW_WORDS or row[0] != self._exchange or zlib.crc32(row[:end]) != row[end]:
            return None
        return row[2:end].tolist()
