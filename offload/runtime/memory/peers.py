"""Device memory that the sharers of a host read from each other, and the points at which they wait for each other.

`CudaPeers` is for GPUs. Each process opens the others' allocations, and copy engines read them, which leaves the
multiprocessors to products. Streams wait for each other by numbers in page-locked memory of the host: a stream that has
come to a meeting writes its number for each other, and waits until those of all others are there. So no host and no
kernel waits. (NCCL 2.28 and the symmetric memory of PyTorch have copies of this kind, too.) `HostPeers` does the same
on CPUs.

Every sharer makes the same calls in the same order on one stream. Then no stream waits for ever: a meeting needs
earlier calls alone.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple, Protocol

import torch
from torch.autograd.graph import increment_version

from offload.runtime import cuda_driver
from offload.runtime.memory.fixed_segments import fixed_segments
from offload.runtime.memory.page_locks import lock_pages, unlock_pages
from offload.runtime.sharing.processes import LOOK_EVERY_S, Processes
from offload.runtime.sharing.shared_memory import in_pages, share_memory
from offload.runtime.sharing.sharers import Sharers, exchange_bytes
from offload.runtime.streams.registry import Streams
from offload.runtime.torch_internals import copy_each, current_stream_handle

# Each number is alone in a cache line, which one process writes and one reads.
LINE_BYTES = 64
# What a stream gets in place of a number that will not come: more meetings than any step has.
FAR = 2**30


class Part(NamedTuple):
    """What is read from a sharer: to `target`, from byte `start` of its region on."""

    target: torch.Tensor
    rank: int
    region: int
    start: int


class Peers(Protocol):
    """The device memory of all sharers of a host, from the side of one."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns device memory (uint8) that the others read: the next region. Every sharer calls it, and waits."""
        ...

    def read(self, parts: Sequence[Part]) -> None:
        """Copies parts of the others' memory, on the current stream."""
        ...

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies tensors of this device, on the current stream."""
        ...

    def meet(self) -> None:
        """Makes the later work of the current stream wait until those of all sharers have come to the same call.

        On the CPU it blocks the host, and raises SharerLostError for a sharer that has ended or hangs.
        """
        ...

    def let_go(self) -> None:
        """Ends the waits of this process's stream, because a sharer is lost. What it computes from then on is wrong."""
        ...

    def close(self) -> None:
        """Gives the memory of the others back. The device is idle."""
        ...


class _Numbers:
    """The number of the last meeting that each sharer has come to, for each that waits for it, in shared memory."""

    def __init__(self, sharers: Sharers):
        self._rank, self._count = sharers.rank, sharers.count
        self.nbytes = sharers.count**2 * LINE_BYTES
        self._words = share_memory(sharers, self.nbytes).take(self.nbytes).cast("I")
        self.address = torch.frombuffer(self._words, dtype=torch.uint8).data_ptr()

    def theirs(self, rank: int) -> int:
        """Returns the place of the number of sharer `rank` that this one waits for, in bytes."""
        return (self._rank * self._count + rank) * LINE_BYTES

    def own(self, rank: int) -> int:
        """Returns the place of this sharer's number that sharer `rank` waits for, in bytes."""
        return (rank * self._count + self._rank) * LINE_BYTES

    def __getitem__(self, place: int) -> int:
        return self._words[place // self._words.itemsize]

    def __setitem__(self, place: int, number: int) -> None:
        self._words[place // self._words.itemsize] = number % 2**32


def has_come(number: int, wanted: int) -> bool:
    """Tells whether a number of 32 bits that goes round is at least `wanted`, as a stream sees it."""
    return (number - wanted) % 2**32 < 2**31


class HostPeers:
    """`Peers` of processes whose device is the CPU."""

    def __init__(self, sharers: Sharers):
        self._sharers = sharers
        self._others = [rank for rank in range(sharers.count) if rank != sharers.rank]
        self._processes = Processes(sharers)
        self._numbers = _Numbers(sharers)
        self._number = 0
        self._regions: list[list[torch.Tensor]] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        count = self._sharers.count
        memory = share_memory(self._sharers, count * in_pages(nbytes))
        parts = [memory.take(nbytes) for _ in range(count)]
        self._regions.append(
            [torch.frombuffer(part, dtype=torch.uint8) if nbytes else torch.empty(0) for part in parts]
        )
        return self._regions[-1][self._sharers.rank] if nbytes else torch.empty(0, dtype=torch.uint8)

    def read(self, parts: Sequence[Part]) -> None:
        for target, rank, region, start in parts:
            theirs = self._regions[region][rank][start : start + target.nbytes]
            target.view(torch.uint8).copy_(theirs)

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_each(targets, sources)

    def meet(self) -> None:
        self._number += 1
        for rank in self._others:
            self._numbers[self._numbers.own(rank)] = self._number
        began = time.monotonic()
        for rank in self._others:
            self._processes.awaited(rank, self._arrival(rank), began, self._sharers.limit_s)

    def let_go(self) -> None:
        pass

    def close(self) -> None:
        self._regions.clear()

    def _arrival(self, rank: int) -> Callable[[], bool | None]:
        place, number = self._numbers.theirs(rank), self._number
        return lambda: has_come(self._numbers[place], number) or None


class CudaPeers:
    """`Peers` of processes that have a GPU each. A sharer that ends, or hangs, lets the streams of the others go.

    `agreed` is called with what keeps this process from it, if anything, and raises where any sharer has a problem.
    """

    def __init__(self, sharers: Sharers, streams: Streams, agreed: Callable[[str | None], None]):
        self._sharers, self._device = sharers, streams.device
        self._others = [rank for rank in range(sharers.count) if rank != sharers.rank]
        self._processes = Processes(sharers)
        self._numbers = _Numbers(sharers)
        self._number = 0
        self._is_let_go = False
        # Without memory that the allocator has already: it may lie in segments that no other process opens.
        self._pool = torch.cuda.MemPool()
        self._opened: dict[tuple[int, bytes], int] = {}
        self._regions: list[list[int]] = []
        problem = lock_pages(self._numbers.address, self._numbers.nbytes, self._device)
        self._is_locked = problem is None
        self._closed = threading.Event()
        try:
            agreed(problem or _missing_calls())
        except BaseException:
            self.close()
            raise
        threading.Thread(target=_watch, args=(weakref.ref(self), self._closed), daemon=True).start()

    def allocate(self, nbytes: int) -> torch.Tensor:
        sharers = self._sharers
        with fixed_segments(), torch.cuda.use_mem_pool(self._pool, self._device):
            own = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        handle, offset = cuda_driver.exported(own.data_ptr()) if nbytes else (b"", 0)
        found = exchange_bytes(sharers, handle + offset.to_bytes(8, "little"), "device memory")
        self._regions.append(
            [
                own.data_ptr() if rank == sharers.rank else self._open(rank, given[:-8], given[-8:])
                for rank, given in enumerate(found)
            ]
        )
        return own

    def read(self, parts: Sequence[Part]) -> None:
        stream, regions = current_stream_handle(self._device.index), self._regions
        cuda_driver.queue_copies(
            stream,
            [
                (target.data_ptr(), regions[region][rank] + start, target.nbytes)
                for target, rank, region, start in parts
            ],
        )

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        pairs = list(zip(targets, sources, strict=True))
        plain = [pair for pair in pairs if _are_bytes(*pair)]
        copies = [(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in plain]
        cuda_driver.queue_copies(current_stream_handle(self._device.index), copies)
        # As torch's own copies do: who keeps a target sees that it has changed.
        increment_version([target for target, _ in plain])
        if len(plain) < len(pairs):
            others = [pair for pair in pairs if not _are_bytes(*pair)]
            copy_each([target for target, _ in others], [source for _, source in others])

    def meet(self) -> None:
        if self._is_let_go:
            raise RuntimeError("a step has failed in one of the processes that share weights: begin the run anew")
        self._number += 1
        stream, number, numbers = current_stream_handle(self._device.index), self._number % 2**32, self._numbers
        for rank in self._others:
            cuda_driver.queue_write(stream, numbers.address + numbers.own(rank), number)
        for rank in self._others:
            cuda_driver.queue_wait(stream, numbers.address + numbers.theirs(rank), number)

    def let_go(self) -> None:
        self._is_let_go = True
        for rank in self._others:
            self._numbers[self._numbers.theirs(rank)] = self._number + FAR

    def close(self) -> None:
        self._closed.set()
        self._regions.clear()
        with torch.cuda.device(self._device):
            for base in self._opened.values():
                with suppress(cuda_driver.DriverError):
                    cuda_driver.close(base)
        self._opened.clear()
        if self._is_locked:
            self._is_locked = False
            unlock_pages(self._numbers.address, self._device, wait=False)

    def _open(self, rank: int, handle: bytes, offset: bytes) -> int:
        if not handle:
            return 0
        # A handle is opened once: small regions may lie in one allocation.
        if (rank, handle) not in self._opened:
            with torch.cuda.device(self._device):
                self._opened[rank, handle] = cuda_driver.opened(handle)
        return self._opened[rank, handle] + int.from_bytes(offset, "little")

    def look(self, late: dict[int, tuple[tuple[int, int], float]]) -> None:
        """Lets the stream go once a sharer has ended, or is behind this one's stream for longer than the limit.

        `late` has, from call to call, the numbers of this one and of each that is behind, and since when.
        """
        numbers, now = self._numbers, time.monotonic()
        for rank in self._others:
            state = own, theirs = numbers[numbers.own(rank)], numbers[numbers.theirs(rank)]
            if has_come(theirs, own):
                late.pop(rank, None)
            elif rank not in late or late[rank][0] != state:
                late[rank] = state, now
            is_late = rank in late and now > late[rank][1] + self._sharers.limit_s
            if is_late or self._processes.has_ended(rank):
                self._is_let_go = True
        if self._is_let_go:
            # Each time: a sharer that goes on writes its own number.
            self.let_go()


def _watch(peers: weakref.ref[CudaPeers], closed: threading.Event) -> None:
    late = {}
    while not closed.wait(LOOK_EVERY_S) and (found := peers()) is not None:
        found.look(late)
        del found


def _are_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Tells whether a copy of two tensors is one of consecutive bytes of the device."""
    alike = target.dtype == source.dtype and target.device == source.device and target.shape == source.shape
    return alike and target.is_contiguous() and source.is_contiguous() and type(source) is torch.Tensor


def _missing_calls() -> str | None:
    try:
        cuda_driver.check_complete()
    except cuda_driver.DriverError as error:
        return str(error)
    return None
