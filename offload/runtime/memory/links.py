"""How the devices of sharers exchange slices of weights and of gradients: by copies, or by the sharers' collectives.

A collective's kernels take multiprocessors, which products run more slowly without, and wait there for the other
devices. Copies from memory that all map take none (`peers`). Where devices cannot reach each other's memory, sharers
agree on collectives.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import torch

from offload.runtime.cuda_driver import DriverError
from offload.runtime.memory.cuda_peers import CudaPeers
from offload.runtime.memory.peers import HostPeers, Part, Peers
from offload.runtime.sharing.sharers import Sharers, exchange_bytes
from offload.runtime.streams.registry import Streams
from offload.runtime.torch_internals import copy_each

TRIAL_BYTES = 64 * 1024
TRIAL_LIMIT_S = 20.0

logger = logging.getLogger(__name__)


class Links(Protocol):
    """Every sharer makes the same calls in the same order. Those that exchange run on the current stream.

    `sums_own_memory`: what is summed had better lie in memory from `allocate`.
    """

    sums_own_memory: bool

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns device memory (uint8) for `gather` and `sum`; blocks the host until all sharers have theirs.

        Raises RuntimeError where the others cannot open it.
        """
        ...

    def place_of(self, memory: torch.Tensor) -> int:
        """Returns the number by which sharers tell each other which of this one's allocations a tensor lies in."""
        ...

    def gather(self, whole: torch.Tensor, places: Sequence[int], what: str) -> None:
        """As `Sharers.gather`. `whole` lies in allocations, at the same bytes everywhere; `places` are those of all."""
        ...

    def sum(self, flat: torch.Tensor, what: str, in_slices: bool = False) -> None:
        """As `Sharers.sum`; where `flat` lies in an allocation, it does so at the same bytes of the same everywhere."""
        ...

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        """Copies tensors of this device on the current stream, in the way that leaves most to what it computes."""
        ...

    def let_go(self) -> None:
        """After an error in a step: this process's streams wait for no sharer any more, and nothing more is asked."""
        ...

    def close(self) -> None:
        """Ends them. The device is idle."""
        ...


class CollectiveLinks:
    """`Links` that ask the sharers."""

    sums_own_memory = False

    def __init__(self, sharers: Sharers, device: torch.device):
        self._sharers, self._device = sharers, device

    def allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def place_of(self, memory: torch.Tensor) -> int:
        return 0

    def gather(self, whole: torch.Tensor, places: Sequence[int], what: str) -> None:
        self._sharers.gather(whole, what)

    def sum(self, flat: torch.Tensor, what: str, in_slices: bool = False) -> None:
        self._sharers.sum(flat, what, in_slices)

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        copy_each(targets, sources)

    def let_go(self) -> None:
        pass

    def close(self) -> None:
        pass


class CopyLinks:
    """`Links` by copies from the memory of `peers`, between points at which all have come to the same exchange.

    Gradients are added in the order of the ranks. Sums over several hosts, and of what lies in no allocation, are the
    sharers'.
    """

    def __init__(self, sharers: Sharers, peers: Peers):
        self._sharers, self._peers = sharers, peers
        self.sums_own_memory = sharers.hosts == 1
        self._others = [rank % sharers.count for rank in range(sharers.rank + 1, sharers.rank + sharers.count)]
        self._places: dict[int, int] = {}
        self._next_place = 0

    def allocate(self, nbytes: int) -> torch.Tensor:
        own = self._peers.allocate(nbytes)
        self._places[_address(own)] = self._next_place
        self._next_place += 1
        return own

    def place_of(self, memory: torch.Tensor) -> int:
        return self._places[_address(memory)]

    def gather(self, whole: torch.Tensor, places: Sequence[int], what: str) -> None:
        self._sharers.attempt(partial(self._gather, whole, places), what)

    def _gather(self, whole: torch.Tensor, places: Sequence[int]) -> None:
        start, parts = _start(whole), whole.chunk(self._sharers.count)
        self._peers.meet()
        self._peers.read(
            [Part(parts[rank], rank, places[rank], start + rank * parts[rank].nbytes) for rank in self._others]
        )
        # Before the others have read it, this one's slice may not be overwritten.
        self._peers.meet()

    def sum(self, flat: torch.Tensor, what: str, in_slices: bool = False) -> None:
        sharers, place = self._sharers, self._places.get(_address(flat))
        if place is None or sharers.hosts > 1:
            sharers.sum(flat, what, in_slices)
        else:
            sharers.attempt(partial(self._sum, flat, place, in_slices), what)

    def _sum(self, flat: torch.Tensor, place: int, in_slices: bool) -> None:
        sharers = self._sharers
        own = flat.chunk(sharers.count)[sharers.rank]
        start = _start(own)
        received = [own if rank == sharers.rank else torch.empty_like(own) for rank in range(sharers.count)]
        self._peers.meet()
        self._peers.read([Part(received[rank], rank, place, start) for rank in self._others])
        total, *others = received
        for other in others:
            total += other
        if total is not own:
            own.copy_(total)
        if in_slices:
            self._peers.meet()
        else:
            self._gather(flat, [place] * sharers.count)

    def copy_each(self, targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        self._peers.copy_each(targets, sources)

    def let_go(self) -> None:
        self._peers.let_go()

    def close(self) -> None:
        self._peers.close()
        self._places.clear()


def links_of(sharers: Sharers, streams: Streams) -> Links:
    """Returns the links of sharers, which all call it, as `sharers.links` asks; collectives where copies do not work.

    A dry run, which is alone, has collectives.
    """
    device = streams.device
    if sharers.count == 1 or sharers.links == "collectives" or device.type == "meta":
        return CollectiveLinks(sharers, device)
    if device.type == "cpu":
        return CopyLinks(sharers, HostPeers(sharers))
    try:
        return _tried(sharers, streams)
    except DriverError as error:
        if sharers.rank == 0:
            logger.warning("devices exchange slices by collectives, as with parallel.links=collectives: %s", error)
        return CollectiveLinks(sharers, device)


def _tried(sharers: Sharers, streams: Streams) -> CopyLinks:
    """Returns links that have brought the right bytes once. Raises DriverError, on all sharers, where one could not."""

    def agreed(problem: str | None) -> None:
        found = exchange_bytes(sharers, (problem or "").encode(), "whether devices reach each other's memory")
        for rank, theirs in enumerate(found):
            if theirs:
                raise DriverError(f"rank {sharers.first + rank}: {theirs.decode()}")

    peers = CudaPeers(sharers, streams, agreed)
    links = CopyLinks(sharers, peers)
    try:
        agreed(_problem_of(links, sharers, streams))
    except BaseException:
        links.let_go()
        streams.synchronize()
        links.close()
        raise
    return links


def _problem_of(links: CopyLinks, sharers: Sharers, streams: Streams) -> str | None:
    """Gathers, sums and copies a little; returns why that does not work, or None."""
    done, gather = streams.event(), streams.gather
    try:
        whole = links.allocate(sharers.count * TRIAL_BYTES)
        with streams.on(gather):
            whole.fill_(sharers.count)
            whole.chunk(sharers.count)[sharers.rank].fill_(sharers.rank)
            links.gather(whole, [links.place_of(whole)] * sharers.count, "a trial")
            given = [whole.view(sharers.count, -1).amin(1), whole.view(sharers.count, -1).amax(1)]
            flat = whole.view(torch.float32).fill_(1)
            if links.sums_own_memory:
                links.sum(flat, "a trial")
            copied = torch.zeros_like(flat)
            links.copy_each(copied.chunk(3), flat.chunk(3))
            totals = torch.stack([copied.amin(), copied.amax()])
            done.record(gather)
    except RuntimeError as error:
        return str(error)
    deadline = time.monotonic() + TRIAL_LIMIT_S
    while not done.query():
        if time.monotonic() > deadline:
            return f"a copy from the memory of another device took longer than {TRIAL_LIMIT_S:g} s"
        time.sleep(0.001)
    wanted = list(range(sharers.count))
    is_right = all(part.tolist() == wanted for part in given)
    is_right &= totals.tolist() == [sharers.count if links.sums_own_memory else 1] * 2
    return None if is_right else "copies between two devices brought other bytes"


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _start(tensor: torch.Tensor) -> int:
    """Returns the first byte of a tensor in its storage."""
    return tensor.storage_offset() * tensor.element_size()
