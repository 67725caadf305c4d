"""Counts the memory and the operations of a step on tensors of the meta device, which have shapes and no memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from offload.runtime.tensor_parts import any_wraps
from offload.runtime.torch_internals import (
    TorchDispatchMode,
    overload_name,
    overload_packet,
    storage_address,
)

# torch's CUDA allocator rounds sizes to multiples of this.
ROUNDING_BYTES = 512


class MemoryTracker:
    """Counts bytes of the storages that operations made and that are alive, their peak, and the FLOPs of operations.

    Counts operations on meta tensors inside `recording`, in any thread. Storages that were there before, such as
    parameters, are left out. FLOPs are those of products and convolutions. `gradient_bytes` of the live bytes are
    gradients that stay on the device (`gradient_landed`), `peak_gradient_bytes` were when the peak was reached.
    `spend(flops, copied_bytes)` is called for each operation.
    """

    def __init__(self, spend: Callable[[float, int], None] = lambda flops, copied_bytes: None):
        self.live_bytes = 0
        self.peak_bytes = 0
        self.gradient_bytes = 0
        self.peak_gradient_bytes = 0
        self.flops = 0.0
        self._spend = spend
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
        self._spend(count, 0)

    def add_copy(self, nbytes: int) -> None:
        """Counts an operation that copies so many bytes."""
        self._spend(0.0, nbytes)

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
            self.live_bytes -= nbytes

        self._storages[key] = weakref.ref(storage, gone)
        self.live_bytes += nbytes
        if self.live_bytes > self.peak_bytes:
            self.peak_bytes, self.peak_gradient_bytes = self.live_bytes, self.gradient_bytes


class _Recording(TorchDispatchMode):
    def __init__(self, tracker: MemoryTracker):
        super().__init__()
        self._tracker = tracker

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any_wraps(types):
            # The operations on what it wraps come here one by one.
            return NotImplemented
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        known = {storage_address(tensor.untyped_storage()) for tensor in _counted((args, tuple(kwargs.values())))}
        for tensor in _counted((result,)):
            # A view, or a tensor updated in place, is no new memory.
            if storage_address(tensor.untyped_storage()) not in known:
                self._tracker.add(tensor)
        if overload_packet(function) is torch.ops.aten.copy_:
            self._tracker.add_copy(result.nbytes)
        count = flop_registry.get(overload_packet(function))
        if count is not None:
            if overload_name(function).startswith("dtype"):
                # The dtype of the wider result is an argument where the formulas expect a shape.
                args = tuple(argument for argument in args if isinstance(argument, Tensor))
            self._tracker.add_flops(count(*args, **kwargs, out_val=result))
        return result


def _counted(values: Iterable[object]) -> Iterator[Tensor]:
    """Yields the tensors that count in arguments or results: operators nest tensors in sequences only.

    torch's `tree_leaves`, which knows all containers, takes a tenth of the time of a plan.
    """
    for value in values:
        if isinstance(value, Tensor):
            if value.is_meta and value.layout is torch.strided:
                yield value
        elif isinstance(value, (tuple, list)):
            yield from _counted(value)
