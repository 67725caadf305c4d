"""Tables of storages: those that are not swapped, and those that tensors were saved of in this step.

Both have the address of a storage as key, and keep a weak reference to it. While that lives, no other storage can get
the address. A write in place to saved bytes is noticed by the version counter of the tensor, which autograd advances;
views of a tensor share it, as a rule.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.activations.policy import SpanRecord
from offload.activations.swapped_span import ByteRange, SwappedSpan
from offload.torch_private.torch_internals import StorageWeakRef, set_versions, storage_address


class ExcludedStorages:
    """Storages that are not swapped. A storage that was added several times is excluded until the last removal."""

    def __init__(self) -> None:
        self._storages: dict[int, list[StorageWeakRef]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_address(storage) in self._storages

    def add(self, tensor: torch.Tensor) -> int | None:
        """Excludes the storage of `tensor`, and returns its key. A tensor without a storage (a sparse one) has none."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        self._storages.setdefault(key, []).append(StorageWeakRef(storage))
        return key

    @contextmanager
    def during(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Excludes the storages of `tensors` for the length of the block."""
        keys = [key for tensor in tensors if (key := self.add(tensor)) is not None]
        try:
            yield
        finally:
            for key in keys:
                self._storages[key].pop()
                if not self._storages[key]:
                    del self._storages[key]


class SavedSpan(NamedTuple):
    """A byte range of a living storage, as it was at `version` of the counter that `handle` shares.

    `swapped` refers to the span on the host; None: the bytes stayed on the device.
    """

    byte_range: ByteRange
    handle: torch.Tensor
    version: int
    record: SpanRecord
    swapped: weakref.ref[SwappedSpan] | None


class SavedStorages:
    """The spans that were saved in this step, by storage: bytes that were saved already are not copied again."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[StorageWeakRef, list[SavedSpan]]] = {}

    def find(
        self, storage: torch.UntypedStorage, byte_range: ByteRange, tensor: torch.Tensor
    ) -> tuple[SpanRecord, SwappedSpan | None] | None:
        """Returns the record and the swapped span that have `byte_range` of `tensor` as its bytes are now.

        The span is None where the bytes stayed on the device; the result is None where they were not saved yet.
        Equal versions alone prove nothing: tensors of one storage may have different version counters (those of
        `unsafe_chunk`, of which recurrent cells are made).
        """
        _, spans = self._spans.get(storage_address(storage), (None, ()))
        for saved in spans:
            swapped = saved.swapped and saved.swapped()
            is_dead = saved.swapped is not None and swapped is None
            if is_dead or saved.version != tensor._version or not saved.byte_range.contains(byte_range):
                continue
            if share_version(saved.handle, tensor):
                return saved.record, swapped
        return None

    def add(self, storage: torch.UntypedStorage, span: SavedSpan) -> None:
        """Notes that `span` of `storage` was saved."""
        address = storage_address(storage)
        if address not in self._spans:
            self._spans[address] = (StorageWeakRef(storage), [])
        self._spans[address][1].append(span)


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same version counter."""
    version, before = one._version, other._version
    set_versions((one,), (version + 1,))
    shared = other._version != before
    set_versions((one,), (version,))
    return shared


def version_handle(tensor: torch.Tensor) -> torch.Tensor:
    """Returns an empty tensor that shares the version counter of `tensor`, and none of its memory."""
    handle = tensor.detach()
    # Assigning `data` replaces the memory of a tensor, and keeps the counter that it shares with the original.
    handle.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return handle
