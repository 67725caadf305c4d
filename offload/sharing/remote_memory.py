"""Device memory that the sharers of a host reach from each other, and the points at which they wait for each other.

Every sharer makes the same calls in the same order on one stream. Then no stream waits for ever: a meeting needs
earlier calls alone. `Peers` is for CPUs, `CudaPeers` for GPUs.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

import offload.sharing.cuda_driver as cuda_driver
from offload.memory.host_memory import lock_pages, unlock_pages
from offload.sharing.shared_memory import in_pages, share_memory
from offload.sharing.sharers import LOOK_EVERY_S, Processes, SharerLostError, Sharers, exchange_bytes
from offload.streams.registry import Streams
from offload.torch_private import torch_internals
from offload.torch_private.tensor_parts import is_as_stored
from offload.torch_private.torch_internals import copy_each, current_stream_handle

# Each number is alone in a cache line, which one process writes and one reads.
LINE_BYTES = 64
# What a stream gets in place of a number that will not come: more meetings than any step has.
FAR = 2**30
# Where the settings of the allocator are.
VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# Of the place of a region in its allocation, behind the handle of that.
OFFSET_BYTES = 8


class Part(NamedTuple):
    """A copy between `own`, a contiguous tensor of this sharer, and the region of another from byte `start` on."""

    own: torch.Tensor
    rank: int
    region: int
    start: int


class Numbers:
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


class Peers:
    """The device memory of all sharers of a host, from the side of one. Every sharer makes one, and waits.

    This one is of processes whose device is the CPU.
    """

    def __init__(self, sharers: Sharers):
        self._sharers = sharers
        self._others = [rank for rank in range(sharers.count) if rank != sharers.rank]
        self._processes = Processes(sharers)
        self._numbers = Numbers(sharers)
        self._number = 0
        # Of each region, that of each sharer: a tensor, or its address.
        self._regions: list[list] = []

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns device memory (uint8) that the others reach: the next region. Every sharer calls it, and waits."""
        count, empty = self._sharers.count, torch.empty(0, dtype=torch.uint8)
        memory = share_memory(self._sharers, count * in_pages(nbytes))
        parts = [memory.take(nbytes) for _ in range(count)]
        self._regions.append([torch.frombuffer(part, dtype=torch.uint8) if nbytes else empty for part in parts])
        return self._regions[-1][self._sharers.rank]

    def read(self, parts: Sequence[Part]) -> None:
        """Copies parts of the others' memory, on the current stream."""
        for part in parts:
            part.own.view(torch.uint8).copy_(self._theirs(part))

    def write(self, parts: Sequence[Part]) -> None:
        """Copies parts to the others' memory, on the current stream."""
        for part in parts:
            self._theirs(part).copy_(part.own.view(torch.uint8))

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies tensors of this device, on the current stream."""
        copy_each(targets, sources)

    def meet(self) -> None:
        """Makes the later work of the current stream wait until those of all sharers have come to the same call.

        On the CPU it blocks the host. Raises SharerLostError for a sharer that is lost, RuntimeError after `let_go`.
        """
        self._number += 1
        number, numbers, began = self._number, self._numbers, time.monotonic()
        for rank in self._others:
            numbers[numbers.own(rank)] = number
        for rank in self._others:
            place = numbers.theirs(rank)
            read = lambda place=place: has_come(numbers[place], number) or None  # noqa: E731
            self._processes.awaited(rank, read, began, self._sharers.limit_s)

    def let_go(self) -> None:
        """Ends the waits of this process's stream, because a sharer is lost. What it computes from then on is wrong.

        On the CPU the host waits, and looks for the sharer itself.
        """

    def close(self) -> None:
        """Gives the memory of the others back. The device is idle."""
        self._regions.clear()

    def _theirs(self, part: Part) -> torch.Tensor:
        return self._regions[part.region][part.rank][part.start : part.start + part.own.nbytes]


class CudaPeers(Peers):
    """Those of processes that have a GPU each: they open each other's allocations, and copy engines reach them.

    So multiprocessors are left to products. A stream that has come to a meeting writes its number for each other in
    page-locked host memory, and waits for those of all others: no host and no kernel waits. (NCCL 2.28 and PyTorch's
    symmetric memory have such copies, too.) A thread lets the stream go where a sharer has ended or hangs. `agreed` is
    called with what keeps this process from it, if anything, and raises where any sharer has a problem.
    """

    def __init__(self, sharers: Sharers, streams: Streams, agreed: Callable[[str | None], None]):
        super().__init__(sharers)
        self._device = streams.device
        self._is_let_go = False
        self._lost: SharerLostError | None = None
        # Without memory that the allocator has already: it may lie in segments that no other process opens.
        with torch.cuda.device(self._device):
            self._pool = torch.cuda.MemPool()
        self._opened: dict[tuple[int, bytes], int] = {}
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
        handle, offset, problem = b"", 0, None
        try:
            handle, offset = cuda_driver.exported(own.data_ptr()) if nbytes else (b"", 0)
        except cuda_driver.DriverError as error:
            problem = error
        given = b"" if problem else handle + offset.to_bytes(OFFSET_BYTES, "little")
        found = exchange_bytes(sharers, given, "device memory")
        if problem is not None:
            raise problem
        for rank, theirs in enumerate(found):
            if not theirs:
                raise cuda_driver.DriverError(f"rank {sharers.first + rank} cannot let others reach its memory")
        region = [0 if rank == sharers.rank else self._address(rank, theirs) for rank, theirs in enumerate(found)]
        region[sharers.rank] = own.data_ptr()
        self._regions.append(region)
        return own

    def read(self, parts: Sequence[Part]) -> None:
        self._queue([(part.own.data_ptr(), self._theirs(part), part.own.nbytes) for part in parts])

    def write(self, parts: Sequence[Part]) -> None:
        self._queue([(self._theirs(part), part.own.data_ptr(), part.own.nbytes) for part in parts])

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        plain, others = [], []
        for pair in zip(targets, sources, strict=True):
            (plain if _are_bytes(*pair) else others).append(pair)
        self._queue([(target.data_ptr(), source.data_ptr(), target.nbytes) for target, source in plain])
        # As torch's own copies do: who keeps a target sees that it has changed.
        increment_version([target for target, _ in plain])
        if others:
            copy_each(*zip(*others, strict=True))

    def meet(self) -> None:
        if self._is_let_go:
            raise self._lost or RuntimeError("a step has failed, and the processes that share weights with it")
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
        super().close()
        with torch.cuda.device(self._device):
            for base in self._opened.values():
                with suppress(cuda_driver.DriverError):
                    cuda_driver.close(base)
        self._opened.clear()
        if self._is_locked:
            self._is_locked = False
            unlock_pages(self._numbers.address, self._device, wait=False)

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
            waited_s = now - late[rank][1] if rank in late else 0.0
            if lost := self._processes.lost(rank, waited_s, self._sharers.limit_s):
                self._is_let_go, self._lost = True, lost
        if self._is_let_go:
            # Each time: a sharer that goes on writes its own number.
            self.let_go()

    def _theirs(self, part: Part) -> int:
        return self._regions[part.region][part.rank] + part.start

    def _queue(self, copies: Sequence[tuple[int, int, int]]) -> None:
        cuda_driver.queue_copies(current_stream_handle(self._device.index), copies)

    def _address(self, rank: int, given: bytes) -> int:
        """Returns the address in this process of a region of sharer `rank`, of which that has `given` the place."""
        handle, offset = given[:-OFFSET_BYTES], int.from_bytes(given[-OFFSET_BYTES:], "little")
        if not handle:
            return 0
        # A handle is opened once: small regions may lie in one allocation.
        if (rank, handle) not in self._opened:
            with torch.cuda.device(self._device):
                self._opened[rank, handle] = cuda_driver.opened(handle)
        return self._opened[rank, handle] + offset


def _watch(peers: weakref.ref[CudaPeers], closed: threading.Event) -> None:
    late = {}
    while not closed.wait(LOOK_EVERY_S) and (found := peers()) is not None:
        found.look(late)
        del found


def _are_bytes(target: torch.Tensor, source: torch.Tensor) -> bool:
    """Tells whether a copy of two tensors is one of consecutive bytes of the device."""
    alike = target.dtype == source.dtype and target.device == source.device and target.shape == source.shape
    are_plain = is_as_stored(source) and is_as_stored(target)
    return alike and are_plain and target.is_contiguous() and source.is_contiguous()


def _missing_calls() -> str | None:
    try:
        cuda_driver.check_complete()
    except cuda_driver.DriverError as error:
        return str(error)
    return None


@contextmanager
def fixed_segments() -> Iterator[None]:
    """Makes the allocator take new memory in segments of a fixed size, also where the environment lets segments grow.

    Only these have handles with which other processes open them. Afterwards the environment's settings are in force.
    """
    settings = next(filter(None, map(os.environ.get, VARIABLES)), "")
    if "expandable_segments:True" not in settings:
        yield
        return
    torch_internals.set_allocator("expandable_segments:False")
    try:
        yield
    finally:
        torch_internals.set_allocator(settings)
