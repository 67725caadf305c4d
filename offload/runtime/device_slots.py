"""A fixed pool of device buffers, each of which holds one unit at a time."""

from __future__ import annotations

import torch

from offload.runtime.registry import Event, Streams


def free_device_bytes(device: torch.device) -> int | None:
    """What tensors can still take on `device`: its free memory and what torch's allocator holds; None: unknown."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


class DeviceSlot:
    """One reusable device buffer: `bytes` is uint8.

    `ready` ends the copy that filled the slot; `free` ends the last work that read it. `readers` are the streams that
    read it since it was filled. `content` is what the slot holds, for its owner to say.
    """

    def __init__(self, index: int, nbytes: int, streams: Streams):
        self.index = index
        self.bytes = torch.empty(nbytes, dtype=torch.uint8, device=streams.device)
        self.ready: Event = streams.event()
        self.free: Event = streams.event()
        self.readers: list = []
        self.content: object | None = None

    def __str__(self) -> str:
        return f"device slot {self.index}"


class DeviceSlots:
    """A fixed pool of equal slots, found again by the address of a tensor that lives in one."""

    def __init__(self, count: int, nbytes: int, streams: Streams):
        self.all = [DeviceSlot(index, nbytes, streams) for index in range(count)]
        self._by_address = {_address(slot.bytes): slot for slot in self.all if nbytes}

    def __iter__(self):
        return iter(self.all)

    @property
    def nbytes(self) -> int:
        return sum(slot.bytes.numel() for slot in self.all)

    def slot_of(self, tensor: torch.Tensor) -> DeviceSlot | None:
        """The slot that holds `tensor`'s storage, or None."""
        if tensor.layout is not torch.strided:
            return None
        return self._by_address.get(_address(tensor))


def _address(tensor: torch.Tensor) -> int:
    """Where the storage of `tensor` is: that of its bytes, or its own where it has none, as on the meta device."""
    storage = tensor.untyped_storage()
    return storage.data_ptr() or storage._cdata
