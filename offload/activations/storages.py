"""Bytes of a storage on their way to the host and back.

Tensors come and go while the storage below them stays, and one storage may be saved as many views. So what travels is
a span of a storage, and every view saved of it shares the trip.
"""

from __future__ import annotations

import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from offload.activations.host_pool import PooledBlock
from offload.activations.policy import Candidate
from offload.runtime.deferred_free import PendingFree
from offload.runtime.host_memory import ALIGNMENT_BYTES
from offload.runtime.registry import Stream
from offload.runtime.saved_tensor_hooks import Kept, check_version


class Span(NamedTuple):
    """Bytes `start` to `stop` of a storage."""

    start: int
    stop: int

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Span:
        """The bytes that travel for `tensor`: its own if it has no holes and the storage has much else, else all of it.

        Where a slice has half of the storage, the rest of it is likely to be saved with the next, which overlaps.
        The start is rounded down, so that tensors come back as aligned as they were: kernels choose by alignment.
        """
        extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        whole = cls(0, tensor.untyped_storage().nbytes())
        if extent != tensor.numel() or 2 * tensor.nbytes >= whole.nbytes:
            return whole
        start = tensor.storage_offset() * tensor.itemsize
        return cls(start // ALIGNMENT_BYTES * ALIGNMENT_BYTES, start + tensor.nbytes)

    @property
    def nbytes(self) -> int:
        return self.stop - self.start

    def holds(self, other: Span) -> bool:
        return self.start <= other.start and other.stop <= self.stop


class ReleasedSpan(NamedTuple):
    """What a parcel leaves behind when autograd has dropped the last tensor saved in it."""

    serial: int
    block: PooledBlock
    copy: PendingFree | None
    ahead_bytes: int


class SwappedSpan:
    """A span of one storage, in the host block `block`; parcels are numbered in the order in which they were saved.

    `origin` is a weak reference to the storage: while somebody else keeps that alive, nothing needs to come back.
    `copy` is the device memory that the span came back to, `readers` the streams that wait for it already; `ahead`
    says that nobody has asked for it yet. `round` counts how often all tensors saved in the parcel were unpacked.
    `leaving` refers to the memory on its way out for as long as it is kept. Nothing of this package keeps a parcel
    alive but the tensors saved in it; what remains of it goes to `released`.
    """

    def __init__(
        self,
        serial: int,
        candidate: Candidate,
        span: Span,
        storage: torch.UntypedStorage,
        block: PooledBlock,
        released: deque[ReleasedSpan],
    ):
        self.serial = serial
        self.candidate = candidate
        self.span = span
        self.origin = StorageWeakRef(storage)
        self.block = block
        self.leaving: weakref.ref[PendingFree] | None = None
        self.copy: PendingFree | None = None
        self.readers: list = []
        self.ahead = False
        self.round = 0
        self._released = released
        self._members = 0
        self._waiting = 0
        self._dropped: StorageWeakRef | None = None

    def __del__(self) -> None:
        copy = None if self.readers else self.copy
        self._released.append(ReleasedSpan(self.serial, self.block, copy, self.span.nbytes if self.ahead else 0))

    @property
    def is_leaving(self) -> bool:
        """Whether the memory that it was copied from is still kept for that copy."""
        return self.leaving is not None and self.leaving() is not None

    def original(self) -> torch.UntypedStorage | None:
        """The storage itself, if it is still alive."""
        return torch.UntypedStorage._new_with_weak_ptr(self.origin.cdata)

    def join(self) -> int:
        """One more tensor is saved in this parcel; returns the round of unpacking that it waits for."""
        self._members += 1
        self._waiting += 1
        return self.round

    def unpacked(self, waited_for: int) -> int:
        """One of the tensors was unpacked; returns the next round that it waits for.

        When all have been, once each, the device copy is dropped.
        """
        if waited_for == self.round:
            self._waiting -= 1
        following = self.round + 1
        if not self._waiting:
            self.drop()
            self.round, self._waiting = following, self._members
        return following

    def drop(self) -> None:
        """Forgets the device copy. The streams that waited for it remain known until the next is made."""
        if self.copy is not None:
            self._dropped = StorageWeakRef(self.copy.tensor.untyped_storage())
            self.copy = None

    def dropped(self, stream: Stream) -> torch.UntypedStorage | None:
        """The copy that was dropped, if somebody still holds it and `stream` has waited for it.

        A backward formula may ask several times for what it saved.
        """
        if self._dropped is None or stream not in self.readers:
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._dropped.cdata)


@dataclass(eq=False)
class Packed:
    """A tensor saved in a parcel: how it lies in the storage, and the version that autograd would check.

    `handle` is an empty tensor that shares its version counter, without its memory.
    """

    parcel: SwappedSpan
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    strides: tuple[int, ...]
    handle: torch.Tensor
    version: int
    round: int = field(init=False)

    def __post_init__(self) -> None:
        self.round = self.parcel.join()

    def check(self) -> None:
        """Raises RuntimeError if the tensor was modified since it was saved."""
        check_version(self.handle._version, self.version, self.dtype, self.shape)

    def view(self, storage: torch.UntypedStorage, start: int) -> torch.Tensor:
        """The tensor over `storage`, whose first byte is byte `start` of the storage that it was saved from."""
        offset = self.offset - start // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype, device=storage.device).set_(storage, offset, self.shape, self.strides)


class Staying(NamedTuple):
    """A tensor that could have been swapped and was not."""

    kept: Kept
    candidate: Candidate


class SavedSpan(NamedTuple):
    """A span of a live storage, as it was at `version` of the counter that `handle` shares.

    `parcel` is None where it stayed on the device.
    """

    span: Span
    handle: torch.Tensor
    version: int
    candidate: Candidate
    parcel: weakref.ref[SwappedSpan] | None


class Origins:
    """The storages saved of in this step, and the trips of each.

    The weak references keep the address of a storage that died from being taken by another.
    """

    def __init__(self) -> None:
        self._trips: dict[int, tuple[StorageWeakRef, list[SavedSpan]]] = {}

    def find(
        self, storage: torch.UntypedStorage, span: Span, tensor: torch.Tensor
    ) -> tuple[Candidate, SwappedSpan | None] | None:
        """The candidate and the parcel that have the bytes `span` of `tensor` as they are now.

        Tensors of one storage may have counters of their own (those of `unsafe_chunk`, of which recurrent cells are
        made): then equal versions say nothing.
        """
        _, trips = self._trips.get(storage._cdata, (None, ()))
        for trip in trips:
            parcel = trip.parcel and trip.parcel()
            here = parcel is not None or trip.parcel is None
            if (
                here
                and trip.span.holds(span)
                and trip.version == tensor._version
                and share_version(trip.handle, tensor)
            ):
                return trip.candidate, parcel
        return None

    def add(self, storage: torch.UntypedStorage, trip: SavedSpan) -> None:
        if storage._cdata not in self._trips:
            self._trips[storage._cdata] = (StorageWeakRef(storage), [])
        self._trips[storage._cdata][1].append(trip)

    def clear(self) -> None:
        self._trips.clear()


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors have one version counter: a write to either is seen at both."""
    set_version = torch._C._autograd._unsafe_set_version_counter
    version = one._version
    before = other._version
    set_version((one,), (version + 1,))
    shared = other._version != before
    set_version((one,), (version,))
    return shared


class VersionHandles:
    """Makes empty tensors that share the version counter of another."""

    def __init__(self, device: torch.device):
        self._device = device
        self._nothing: dict[torch.dtype, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype not in self._nothing:
            self._nothing[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=self._device)
        handle = tensor.detach()
        # Assigning `data` changes what a tensor holds, and leaves the counter that it shares with the original.
        handle.data = self._nothing[tensor.dtype]
        return handle


class Exclusions:
    """A storage is excluded until all that excluded it have let go, or all is forgotten.

    The weak references keep the address of a storage that died from being taken by another.
    """

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage._cdata in self._storages

    def add(self, tensor: torch.Tensor) -> None:
        """Excludes the storage of `tensor`, once more; a tensor without one is passed over."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            reference, count = self._storages.get(storage._cdata, (None, 0))
            self._storages[storage._cdata] = (reference or StorageWeakRef(storage), count + 1)

    def forget(self) -> None:
        self._storages.clear()

    @contextmanager
    def during(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """For the length of the block, the storages of `tensors` are excluded."""
        tensors = list(tensors)
        for tensor in tensors:
            self.add(tensor)
        try:
            yield
        finally:
            for tensor in tensors:
                self._remove(tensor)

    def _remove(self, tensor: torch.Tensor) -> None:
        if tensor.layout is not torch.strided:
            return
        address = tensor.untyped_storage()._cdata
        reference, count = self._storages.get(address, (None, 0))
        if count > 1:
            self._storages[address] = (reference, count - 1)
        else:
            self._storages.pop(address, None)


class UseOrder:
    """Learned from the record of a step. A span is known again by its number in the order of saving, and its size."""

    def __init__(self) -> None:
        self._used_at: dict[tuple[int, int], int] = {}
        self._times: list[int] = []
        self._parcels: list[weakref.ref[SwappedSpan]] = []
        self._alike = False

    def learn(self, record: Sequence[Candidate]) -> None:
        """A step is over: its candidates in order."""
        self._used_at = {(c.ordinal, c.nbytes): c.used_at for c in record if c.used_at is not None}
        self.expect([])

    def expect(self, parcels: Sequence[SwappedSpan]) -> None:
        """These have been saved in this step, and may all be used."""
        times = [self._used_at.get((parcel.candidate.ordinal, parcel.candidate.nbytes)) for parcel in parcels]
        self._alike = None not in times and bool(self._used_at)
        pairs = sorted(zip(times, parcels, strict=True), key=lambda pair: pair[0]) if self._alike else []
        self._times = [time for time, _ in pairs]
        self._parcels = [weakref.ref(parcel) for _, parcel in pairs]

    def after(self, candidate: Candidate) -> Iterator[SwappedSpan | None] | None:
        """Those that are used after `candidate`, a dead one as None; None where the step before tells nothing."""
        used_at = self._used_at.get((candidate.ordinal, candidate.nbytes))
        if not self._alike or used_at is None:
            return None
        return (self._parcels[index]() for index in range(bisect_right(self._times, used_at), len(self._parcels)))
