"""Counts the memory and the operations of a step on tensors of the meta device, which have shapes and no memory."""

import math
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from offload.planning.known_results import PACKED, known_or_computed, storage_of, tensors_in
from offload.torch_private.tensor_parts import any_wraps
from offload.torch_private.torch_internals import UncompiledMode, overload_packet, storage_address

# torch's CUDA allocator rounds sizes to multiples of this.
ROUNDING_BYTES = 512
# Operations that read no element of their argument.
EMPTY = (torch.ops.aten.empty_like, torch.ops.aten.new_empty, torch.ops.aten.new_empty_strided)


class MemoryTracker:
    """Counts bytes of the storages that operations made and that are alive, their peak, and the FLOPs of operations.

    Counts operations on meta tensors inside `recording`, in any thread. Storages that were there before, such as
    parameters, are left out. FLOPs are those of products and convolutions. `gradient_bytes` of the live bytes are
    gradients that stay on the device (`gradient_landed`), `peak_gradient_bytes` were when the peak was reached.
    `dequantised_bytes` are those that operations read and wrote which make a weight of one in few bits: their time is
    that of memory, and products, which the rate of FLOPs is measured with, have no such work.
    `spend(flops, copied_bytes, dequantised_bytes)` is called for each operation.
    """

    def __init__(self, spend: Callable[[float, int, int], None] = lambda flops, copied_bytes, dequantised_bytes: None):
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        self.peak_gradient_bytes = 0
        self.flops = 0.0
        self.dequantised_bytes = 0
        self.spend = spend
        self.unpacked: set[int] = set()
        """storages with weights on their way from few bits to many"""
        self._landed: set[Tensor] = set()
        self._storages: dict[int, weakref.ref] = {}
        self._thread = threading.local()

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Counts the operations of the calling thread inside the block. Does nothing where it is nested in itself."""
        if getattr(self._thread, "records", False):
            yield
            return
        self._thread.records = True
        try:
            with _Recording(self):
                yield
        finally:
            self._thread.records = False

    def add_flops(self, count: float) -> None:
        """Counts the FLOPs of an operation that the tracker cannot see by itself."""
        self.flops += count
        self.spend(count, 0, 0)

    def add_dequantising(self, read: Sequence[Tensor], made: Tensor) -> None:
        """Counts an operation that makes a new tensor, if it is one on the way from few bits to a weight."""
        sources = [each for each in read if each.dtype in PACKED or storage_of(each) in self.unpacked]
        if not sources or made.numel() < max(each.numel() for each in sources):
            return
        self.unpacked.add(storage_of(made))
        nbytes = sum(map(_bytes_read, read)) + made.nbytes
        self.dequantised_bytes += nbytes
        self.spend(0.0, 0, nbytes)

    def start_step(self) -> None:
        """Starts a step: no gradient is there yet, and the peak is the bytes alive now."""
        self.peak_bytes = self.live_bytes
        self.gradient_bytes = self.peak_gradient_bytes = 0
        self._landed.clear()

    def gradient_landed(self, parameter: Tensor) -> None:
        """Counts the gradient of `parameter`, which stays on the device; a hook of autograd."""
        if parameter not in self._landed:
            self._landed.add(parameter)
            self.gradient_bytes += parameter.grad.nbytes

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor, once, for as long as it lives."""
        storage = tensor.untyped_storage()
        key = storage_address(storage)
        if key in self._storages:
            return
        nbytes = -(-storage.nbytes() // ROUNDING_BYTES) * ROUNDING_BYTES

        def gone(_: object) -> None:
            del self._storages[key]
            self.unpacked.discard(key)
            self.live_bytes -= nbytes

        self._storages[key] = weakref.ref(storage, gone)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_gradient_bytes = self.live_bytes, self.gradient_bytes


class _Recording(UncompiledMode):
    def __init__(self, tracker: MemoryTracker):
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any_wraps(types):
            # The operations on what it wraps come here one by one.
            return NotImplemented
        kwargs, tracker = kwargs or {}, self._tracker
        result, made, known = known_or_computed(function, args, kwargs)
        for tensor in made:
            tracker.add(tensor)
        if known.copied_bytes is not None:
            tracker.spend(0.0, known.copied_bytes, 0)
        if known.flops is not None:
            tracker.add_flops(known.flops)
        elif len(made) == 1 and (known.unpacks or tracker.unpacked) and overload_packet(function) not in EMPTY:
            tracker.add_dequantising(list(tensors_in((args, *kwargs.values()))), made[0])
        return result


def _bytes_read(tensor: Tensor) -> int:
    """Returns the bytes of the elements of `tensor` in memory: of one that was expanded, those of the original."""
    sizes = (size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride)
    return tensor.itemsize * math.prod(sizes)
