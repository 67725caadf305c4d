"""Device memory that the sharers of a host reach from each other, and the points at which they wait for each other.

Every sharer makes the same calls in the same order on one stream. Then no stream waits for ever: a meeting needs
earlier calls alone. `HostPeers` is for CPUs; `cuda_peers` has that for GPUs.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from offload.sharing.shared_memory import in_pages, share_memory
from offload.sharing.sharers import Processes, Sharers
from offload.torch_private.torch_internals import copy_each

# Each number is alone in a cache line, which one process writes and one reads.
LINE_BYTES = 64


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
    """The device memory of all sharers of a host, from the side of one. Every sharer makes one, and waits."""

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
        raise NotImplementedError

    def read(self, parts: Sequence[Part]) -> None:
        """Copies parts of the others' memory, on the current stream."""
        raise NotImplementedError

    def write(self, parts: Sequence[Part]) -> None:
        """Copies parts to the others' memory, on the current stream."""
        raise NotImplementedError

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies tensors of this device, on the current stream."""
        raise NotImplementedError

    def meet(self) -> None:
        """Makes the later work of the current stream wait until those of all sharers have come to the same call.

        On the CPU it blocks the host. Raises SharerLostError for a sharer that is known to have ended or to hang, and
        RuntimeError after `let_go`.
        """
        raise NotImplementedError

    def let_go(self) -> None:
        """Ends the waits of this process's stream, because a sharer is lost. What it computes from then on is wrong."""

    def close(self) -> None:
        """Gives the memory of the others back. The device is idle."""
        self._regions.clear()


class HostPeers(Peers):
    """Those of processes whose device is the CPU."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        count = self._sharers.count
        memory = share_memory(self._sharers, count * in_pages(nbytes))
        parts = [memory.take(nbytes) for _ in range(count)]
        self._regions.append(
            [torch.frombuffer(part, dtype=torch.uint8) if nbytes else torch.empty(0) for part in parts]
        )
        return self._regions[-1][self._sharers.rank] if nbytes else torch.empty(0, dtype=torch.uint8)

    def read(self, parts: Sequence[Part]) -> None:
        for part in parts:
            part.own.view(torch.uint8).copy_(self._theirs(part))

    def write(self, parts: Sequence[Part]) -> None:
        for part in parts:
            self._theirs(part).copy_(part.own.view(torch.uint8))

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_each(targets, sources)

    def meet(self) -> None:
        self._number += 1
        for rank in self._others:
            self._numbers[self._numbers.own(rank)] = self._number
        began = time.monotonic()
        for rank in self._others:
            self._processes.awaited(rank, self._arrival(rank), began, self._sharers.limit_s)

    def _theirs(self, part: Part) -> torch.Tensor:
        return self._regions[part.region][part.rank][part.start : part.start + part.own.nbytes]

    def _arrival(self, rank: int) -> Callable[[], bool | None]:
        place, number = self._numbers.theirs(rank), self._number
        return lambda: has_come(self._numbers[place], number) or None
