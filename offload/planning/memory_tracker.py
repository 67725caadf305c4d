"""What a step would hold and compute, counted over tensors of the meta device, which have shapes and no memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.utils.flop_counter import flop_registry

from offload.runtime.torch_internals import (
    TorchDispatchMode,
    overload_name,
    overload_packet,
    storage_address,
    tree_leaves,
)

# What torch's CUDA allocator rounds to.
ROUNDING_BYTES = 512


class MemoryTracker:
    """Bytes of the storages that operations made and that are alive, their peak, and the operations' FLOPs.

    `gradient_bytes` of them are gradients that `landed`, `peak_gradient_bytes` were when the peak was reached.

    `spend` is told of each operation: its FLOPs, and the bytes that it copies.

    It counts what runs inside `recording`, in any thread, over meta tensors. Storages that were there before, such as
    parameters, are not counted. FLOPs are those of products and convolutions.
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
        """Counts what the calling thread computes; nested in itself it does nothing."""
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
        """For operations that are not known by themselves."""
        self.flops += count
        self._spend(count, 0)

    def add_copy(self, nbytes: int) -> None:
        """An operation copies so many bytes."""
        self._spend(0.0, nbytes)

    def start_step(self) -> None:
        """No gradient is there yet, and the peak starts again from what is alive."""
        self.peak_bytes = self.live_bytes
        self.gradient_bytes = self.peak_gradient_bytes = 0
        self._landed.clear()

    def landed(self, parameter: Tensor) -> None:
        """A hook: the gradient of `parameter` has landed, and stays on the device."""
        if parameter not in self._landed:
            self._landed.add(parameter)
            self.gradient_bytes += parameter.grad.nbytes

    def add(self, tensor: Tensor) -> None:
        """Counts the storage of a tensor for as long as it lives, once."""
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
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        known = {storage_address(leaf.untyped_storage()) for leaf in tree_leaves((args, kwargs)) if _counts(leaf)}
        for leaf in tree_leaves(result):
            # A view, or what is updated in place, is no new memory.
            if _counts(leaf) and storage_address(leaf.untyped_storage()) not in known:
                self._tracker.add(leaf)
        if overload_packet(function) is torch.ops.aten.copy_:
            self._tracker.add_copy(result.nbytes)
        count = flop_registry.get(overload_packet(function))
        if count is not None:
            if overload_name(function).startswith("dtype"):
                # The wider dtype of the result comes where the formulas expect its shape.
                args = tuple(argument for argument in args if isinstance(argument, Tensor))
            self._tracker.add_flops(count(*args, **kwargs, out_val=result))
        return result


def _counts(leaf: object) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_meta and leaf.layout is torch.strided
