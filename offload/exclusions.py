"""Storages that are not swapped, for somebody keeps them: parameters, buffers, what the caller passed in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch.multiprocessing.reductions import StorageWeakRef


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
