"""Tables of storages: those that are not swapped, and those that tensors were saved of in this step.

Both have the address of the storage as key, and keep a weak reference to it. While the weak reference lives, no other
storage can get the address.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from offload.activations.policy import SpanRecord
from offload.activations.swapped_span import ByteRange, SwappedSpan
from offload.activations.versions import share_version
from offload.torch_private.torch_internals import StorageWeakRef, storage_address


class ExcludedStorages:
    """Storages that are not swapped. A storage that was added several times is excluded until the last removal."""

    def __init__(self) -> None:
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __contains__(self, storage: torch.UntypedStorage) -> bool:
        return storage_address(storage) in self._storages

    def add(self, tensor: torch.Tensor) -> None:
        """Excludes the storage of `tensor`. A tensor without a storage (a sparse one) is ignored."""
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            reference, count = self._storages.get(storage_address(storage), (None, 0))
            self._storages[storage_address(storage)] = (reference or StorageWeakRef(storage), count + 1)

    @contextmanager
    def during(self, tensors: Iterable[torch.Tensor]) -> Iterator[None]:
        """Excludes the storages of `tensors` for the length of the block."""
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
        address = storage_address(tensor.untyped_storage())
        reference, count = self._storages.get(address, (None, 0))
        if count > 1:
            self._storages[address] = (reference, count - 1)
        else:
            self._storages.pop(address, None)


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
            exists = swapped is not None or saved.swapped is None
            if (
                exists
                and saved.byte_range.contains(byte_range)
                and saved.version == tensor._version
                and share_version(saved.handle, tensor)
            ):
                return saved.record, swapped
        return None

    def add(self, storage: torch.UntypedStorage, span: SavedSpan) -> None:
        """Notes that `span` of `storage` was saved."""
        address = storage_address(storage)
        if address not in self._spans:
            self._spans[address] = (StorageWeakRef(storage), [])
        self._spans[address][1].append(span)
