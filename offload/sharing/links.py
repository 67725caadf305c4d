"""Devices of sharers exchange slices of weights and of gradients: by copies, or by the sharers' collectives.

Copies between memory that all map (`remote_memory`) take no multiprocessors. A collective's kernels do, and products
run more slowly meanwhile: they are for devices that cannot reach each other's memory, and for sums over several hosts.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch.autograd.graph import increment_version

from offload.sharing.cuda_driver import DriverError
from offload.sharing.remote_memory import CudaPeers, Part, Peers
from offload.sharing.sharers import Sharers, exchange_bytes
from offload.streams.registry import Streams
from offload.torch_private.tensor_parts import is_as_stored
from offload.torch_private.torch_internals import copy_each

TRIAL_BYTES = 64 * 1024
TRIAL_LIMIT_S = 20.0

logger = logging.getLogger(__name__)


class Addends(NamedTuple):
    """Tensors of this sharer, to each of which the others have one to add.

    `flat` [n] is memory for the sums, a slice for each sharer, which the current stream may write; in an allocation, it
    is at the same bytes of the same one everywhere. `views` are the places of the tensors in it, in their shapes.
    """

    flat: torch.Tensor
    views: Sequence[torch.Tensor]
    tensors: Sequence[torch.Tensor]


class _Piece(NamedTuple):
    """Elements of one of the tensors of a sum: their values, and where their sums are to lie, in one slice."""

    values: torch.Tensor
    sums: torch.Tensor


class Links:
    """Exchanges by the sharers' collectives, on the current stream. Every sharer makes the same calls in one order.

    `sums_own_memory`: what is summed had better lie in memory from `allocate`.
    """

    sums_own_memory = False

    def __init__(self, sharers: Sharers, device: torch.device):
        self._sharers, self._device = sharers, device

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Returns device memory (uint8) for `gather` and `sum`; blocks the host until all sharers have theirs.

        Raises RuntimeError where the others cannot open it.
        """
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def place_of(self, memory: torch.Tensor) -> int:
        """Returns the number by which sharers tell each other which of this one's allocations a tensor lies in."""
        return 0

    def gather(self, whole: torch.Tensor, places: Sequence[int], what: str) -> None:
        """As `Sharers.gather`. `whole` lies in allocations, at the same bytes everywhere; `places` are those of all."""
        self._sharers.gather(whole, what)

    def sum(self, addends: Addends, what: str, in_slices: bool = False) -> None:
        """Sums over sharers, into `addends.flat`: all of the sums, or with `in_slices` this sharer's slice alone."""
        copy_each(addends.views, addends.tensors)
        self._sharers.sum(addends.flat, what)

    def sum_in_place(self, addends: Addends, what: str) -> None:
        """Sums over sharers, into `addends.tensors`; `addends.flat` has no values afterwards."""
        self.sum(addends, what)
        copy_each(addends.tensors, addends.views)

    def let_go(self) -> None:
        """After an error in a step: this process's streams wait for no sharer any more, and nothing more is asked."""

    def close(self) -> None:
        """Ends them. The device is idle."""


class CopyLinks(Links):
    """Exchanges by copies from the memory of `peers`, between points at which all have come to the same exchange.

    Gradients are added in the order of the ranks. Sums over several hosts, and of what lies in no allocation, are the
    sharers'.
    """

    def __init__(self, sharers: Sharers, device: torch.device, peers: Peers):
        super().__init__(sharers, device)
        self._peers = peers
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

    def sum(self, addends: Addends, what: str, in_slices: bool = False) -> None:
        sharers, place = self._sharers, self._places.get(_address(addends.flat))
        if place is None or sharers.hosts > 1:
            self._peers.copy_each(addends.views, addends.tensors)
            sharers.sum(addends.flat, what)
        else:
            sharers.attempt(partial(self._sum, addends, place, in_slices), what)

    def _sum(self, addends: Addends, place: int, in_slices: bool) -> None:
        self._sum_slices(addends.flat, place, self._pieces(addends))
        if not in_slices:
            self._gather(addends.flat, [place] * self._sharers.count)

    def sum_in_place(self, addends: Addends, what: str) -> None:
        place = self._places.get(_address(addends.flat))
        if place is None or self._sharers.hosts > 1:
            self.sum(addends, what)
            self._peers.copy_each(addends.tensors, addends.views)
        else:
            self._sharers.attempt(partial(self._sum_in_place, addends, place), what)

    def _sum_in_place(self, addends: Addends, place: int) -> None:
        flat, views, tensors = addends
        dense = [_dense(tensor, view) for tensor, view in zip(tensors, views, strict=True)]
        pieces = self._pieces(Addends(flat, views, dense))
        self._sum_slices(flat, place, pieces)
        self._peers.meet()
        theirs = [(rank, piece) for rank in self._others for piece in pieces[rank]]
        self._peers.read([Part(piece.values, rank, place, _start(piece.sums)) for rank, piece in theirs])
        if own := pieces[self._sharers.rank]:
            self._peers.copy_each([piece.values for piece in own], [piece.sums for piece in own])
        # Before the others have read it, this one's slice may not be overwritten.
        self._peers.meet()
        increment_version(dense)
        for tensor, values in zip(tensors, dense, strict=True):
            if tensor is not values:
                tensor.copy_(values)

    def _sum_slices(self, flat: torch.Tensor, place: int, pieces: list[list[_Piece]]) -> None:
        """Makes this sharer's slice of `flat` that of the sums, of which each sends the others what they add."""
        sharers, peers = self._sharers, self._peers
        slices, sent = flat.chunk(sharers.count), []
        for rank in self._others:
            to_slice = _received_in(rank, sharers.rank)
            moved = (to_slice - rank) * slices[rank].nbytes
            sent += [Part(piece.values, rank, place, _start(piece.sums) + moved) for piece in pieces[rank]]
        # Before this, the others may still use their memory for something else.
        peers.meet()
        peers.write(sent)
        peers.meet()
        # In the order of ranks: of the first two sharers either may be added to the other.
        for rank in range(sharers.count):
            if rank == sharers.rank:
                for piece in pieces[rank]:
                    piece.sums.add_(piece.values)
            elif (received_in := _received_in(sharers.rank, rank)) != sharers.rank:
                slices[sharers.rank].add_(slices[received_in])

    def _pieces(self, addends: Addends) -> list[list[_Piece]]:
        """Returns what each sharer's slice of the sums has of the tensors."""
        flat, count = addends.flat, self._sharers.count
        size = max(1, flat.numel() // count)
        found: list[list[_Piece]] = [[] for _ in range(count)]
        for view, tensor in zip(addends.views, addends.tensors, strict=True):
            values = _dense(tensor, view).as_strided((view.numel(),), (1,))
            start = view.storage_offset() - flat.storage_offset()
            for rank in range(start // size, -(-(start + view.numel()) // size)):
                first, last = max(start, rank * size), min(start + view.numel(), (rank + 1) * size)
                if first < last:
                    found[rank].append(_Piece(values[first - start : last - start], flat[first:last]))
        return found

    def let_go(self) -> None:
        self._peers.let_go()

    def close(self) -> None:
        self._peers.close()
        self._places.clear()


def links_of(sharers: Sharers, streams: Streams) -> Links:
    """Returns the links of sharers, which all call it: copies where these work, else collectives.

    A dry run, which is alone, has collectives.
    """
    device = streams.device
    if sharers.count == 1 or device.type == "meta":
        return Links(sharers, device)
    try:
        return CopyLinks(sharers, device, Peers(sharers)) if device.type == "cpu" else _tried(sharers, streams)
    except DriverError as error:
        if sharers.rank == 0:
            logger.warning("devices exchange slices by collectives, which is slower than by copies: %s", error)
        return Links(sharers, device)


def _tried(sharers: Sharers, streams: Streams) -> CopyLinks:
    """Returns links that have brought the right bytes once. Raises DriverError, on all sharers, where one could not."""

    def agreed(problem: str | None) -> None:
        found = exchange_bytes(sharers, (problem or "").encode(), "whether devices reach each other's memory")
        for rank, theirs in enumerate(found):
            if theirs:
                raise DriverError(f"rank {sharers.first + rank}: {theirs.decode()}")

    peers = CudaPeers(sharers, streams, agreed)
    links = CopyLinks(sharers, streams.device, peers)
    try:
        agreed(_problem_of(links, sharers, streams))
    except BaseException:
        links.let_go()
        streams.synchronize()
        links.close()
        raise
    return links


def _problem_of(links: CopyLinks, sharers: Sharers, streams: Streams) -> str | None:
    """Gathers and sums a little; returns why that does not work, or None."""
    done, gather = streams.event(), streams.gather
    try:
        whole = links.allocate(sharers.count * TRIAL_BYTES)
        with streams.on(gather):
            whole.fill_(sharers.count)
            whole.chunk(sharers.count)[sharers.rank].fill_(sharers.rank)
            links.gather(whole, [links.place_of(whole)] * sharers.count, "a trial")
            given = [whole.view(sharers.count, -1).amin(1), whole.view(sharers.count, -1).amax(1)]
            flat = whole.view(torch.float32)
            added = torch.ones_like(flat)
            if links.sums_own_memory:
                links.sum_in_place(Addends(flat, flat.chunk(3), added.chunk(3)), "a trial")
            totals = torch.stack([added.amin(), added.amax()])
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


def _received_in(rank: int, sender: int) -> int:
    """Returns the slice of the memory of sharer `rank` in which that receives what `sender` adds to its own slice.

    The first of the others sends to the slice of the sums, to which the rest is added.
    """
    is_first = sender == (0 if rank else 1)
    return rank if is_first else sender


def _dense(tensor: torch.Tensor, view: torch.Tensor) -> torch.Tensor:
    """Returns the values of a tensor in consecutive elements, in the order of `view`: in its own memory if they are."""
    is_alike = tensor.stride() == view.stride() or (tensor.is_contiguous() and view.is_contiguous())
    if is_alike and tensor.dtype == view.dtype and is_as_stored(tensor):
        return tensor
    return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, device=view.device).copy_(tensor)


def _address(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _start(tensor: torch.Tensor) -> int:
    """Returns the first byte of a tensor in its storage."""
    return tensor.storage_offset() * tensor.element_size()
