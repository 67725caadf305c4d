"""A fixed pool of device buffers, each of which holds one unit at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from functools import partial

import torch
from torch import nn

from offload.streams.registry import Event, Stream, Streams
from offload.torch_private.tensor_parts import kind_wraps
from offload.torch_private.torch_internals import is_function_transform_tensor, storage_address

# Classes of tensors that wrap no others.
PLAIN = {torch.Tensor, nn.Parameter}


class _Typed(dict[torch.dtype, torch.Tensor]):
    """Flat views of bytes by dtype, made when they are asked for first."""

    def __init__(self, memory: torch.Tensor):
        super().__init__()
        self._memory = memory

    def __missing__(self, dtype: torch.dtype) -> torch.Tensor:
        return self.setdefault(dtype, self._memory.view(dtype))


class DeviceSlot:
    """One reusable device buffer: `bytes` is a uint8 tensor.

    `ready` marks the end of the copy that filled the slot, `free` the end of the last work that read it. `readers` are
    the streams that have read it since it was filled; `read_by` is the one whose reads are over, by `free`, if any.
    `content` is set by the owner of the slots: the unit in it. `typed[dtype]` is a flat view of `bytes`, the same
    object every time.
    """

    def __init__(self, index: int, memory: torch.Tensor, streams: Streams):
        self.index = index
        self.bytes = memory
        self.ready: Event = streams.event()
        self.free: Event = streams.event()
        self.readers: list = []
        self.read_by: Stream | None = None
        self.content: object | None = None
        self.source: object | None = None
        self.typed = _Typed(memory)

    def __str__(self) -> str:
        return f"device slot {self.index}"


class DeviceSlots:
    """A fixed pool of slots of equal size, in memory (uint8) from `allocate`, by default the device's own.

    A slot is found by the address of a tensor that lies in it.
    """

    def __init__(
        self, count: int, nbytes: int, streams: Streams, allocate: Callable[[int], torch.Tensor] | None = None
    ):
        allocate = allocate or partial(torch.empty, dtype=torch.uint8, device=streams.device)
        self.all = [DeviceSlot(index, allocate(nbytes), streams) for index in range(count)]
        self._by_address = {_address(slot.bytes): slot for slot in self.all if nbytes}
        self._nbytes = nbytes
        self._starts = sorted(self._by_address)
        self._tells_by_address = all(slot.bytes.data_ptr() for slot in self.all)

    def __iter__(self):
        return iter(self.all)

    @property
    def nbytes(self) -> int:
        return sum(slot.bytes.numel() for slot in self.all)

    def slot_of(self, tensor: torch.Tensor) -> DeviceSlot | None:
        """Returns the slot in which the storage of `tensor` lies, or that of a tensor which it wraps; or None."""
        kind = type(tensor)
        if kind not in PLAIN and kind_wraps(kind):
            names, _ = tensor.__tensor_flatten__()
            return next(filter(None, (self.slot_of(getattr(tensor, name)) for name in names)), None)
        if tensor.layout is not torch.strided:
            return None
        try:
            # Most tensors that are asked for lie in no slot, which their own address tells in a third of the time.
            # On the meta device all have the same.
            if self._tells_by_address and (address := tensor.data_ptr()):
                index = bisect_right(self._starts, address) - 1
                if index < 0 or address >= self._starts[index] + self._nbytes:
                    return None
            storage = tensor.untyped_storage()
        except RuntimeError:
            # A tensor of a transform of torch.func has no memory of its own. A window refuses it.
            if is_function_transform_tensor(tensor):
                return None
            raise
        return self._by_address.get(storage.data_ptr() or storage_address(storage))


def _address(tensor: torch.Tensor) -> int:
    """Returns the address of the bytes of `tensor`'s storage; on the meta device, where it has none, its own."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage_address(storage)
