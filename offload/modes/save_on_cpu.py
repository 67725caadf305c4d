"""save_on_cpu: torch's own `torch.autograd.graph.save_on_cpu` around the model, a baseline to compare with.

It copies every saved tensor, parameters too, when it is saved, and back when it is used, on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from offload.memory.host_memory import allocator_pinned_bytes
from offload.modes.activation_mode import ActivationMode, MovedActivations
from offload.streams.registry import Streams
from offload.streams.transfer import Counters
from offload.torch_private.tensor_parts import Wrapping, wraps
from offload.torch_private.torch_internals import left_out_of_graphs


@dataclass(kw_only=True, eq=False)
class SaveOnCpu(ActivationMode):
    """Saved tensors wait on the host, over a mode of the weights.

    torch makes the copies. Their bytes are counted where tensors go to its hooks and come back. Nobody times how long
    compute waits for them, so `stall_ms` is None. On the CPU, where torch has nothing to copy, the bytes are those that
    a device would copy.

    Args:
        weights: the mode of the weights, such as Resident() or LayerStream().
    """

    def activations(self, model: nn.Module, streams: Streams) -> SavedOnCpu:
        return SavedOnCpu(model, is_dry_run=streams.device.type == "meta")


class SavedOnCpu(MovedActivations):
    """Activations that torch's own hooks move."""

    def __init__(self, model: nn.Module, is_dry_run: bool):
        self._is_dry_run = is_dry_run
        copies = _MetaCopies() if is_dry_run else save_on_cpu(pin_memory=torch.cuda.is_available())
        self._copies = _CountedCopies(copies)
        super().__init__(model)

    def around_forward(self, arguments: tuple, keywords: Mapping) -> AbstractContextManager:
        return self._copies.hooks()

    def counters(self) -> Counters:
        """Returns the bytes of saved tensors, all of which compute waits for.

        Page-locked host memory is that of torch's allocator, which keeps it for the next step. In a dry run the bytes
        that would wait at once are counted as pageable.
        """
        into, out = self._copies.in_bytes, self._copies.out_bytes
        return Counters(
            h2d_bytes=into,
            d2h_bytes=out,
            activation_h2d_bytes=into,
            activation_d2h_bytes=out,
            stall_ms=None,
            waited_for_bytes=into + out,
            host_pinned_bytes=allocator_pinned_bytes(),
            host_pageable_bytes=self._copies.most_waiting_bytes if self._is_dry_run else 0,
        )


class _CountedCopies:
    """Counts the bytes that go out by the pack hook of `hooks` and come back by its unpack hook."""

    def __init__(self, hooks: saved_tensors_hooks):
        self.out_bytes = self.in_bytes = 0
        self.most_waiting_bytes = 0
        self._waiting_bytes = 0
        self._hooks = hooks

    def hooks(self) -> AbstractContextManager:
        return saved_tensors_hooks(self._pack, self._unpack)

    @left_out_of_graphs
    def _pack(self, tensor: Tensor) -> object:
        if wraps(tensor):
            # torch would copy the matrix that a quantised weight stands for.
            return Wrapping.of(tensor, self._pack)
        self.out_bytes += tensor.nbytes
        self._waiting_bytes += tensor.nbytes
        self.most_waiting_bytes = max(self.most_waiting_bytes, self._waiting_bytes)
        # torch allocates on the default device, which may be another (`torch.set_default_device`).
        with torch.device("cpu"):
            # On the CPU torch keeps the tensor itself. With its graph a node's result would keep that node, for ever
            # where no backward runs.
            return self._hooks.pack_hook(tensor.detach())

    @left_out_of_graphs
    def _unpack(self, packed: object) -> Tensor:
        if isinstance(packed, Wrapping):
            return packed.around(self._unpack)
        tensor = self._hooks.unpack_hook(packed)
        self.in_bytes += tensor.nbytes
        self._waiting_bytes -= tensor.nbytes
        return tensor


class _MetaCopies(saved_tensors_hooks):
    """torch's save_on_cpu for meta tensors, which have no bytes to copy."""

    def __init__(self) -> None:
        super().__init__(
            lambda tensor: (tensor.shape, tensor.dtype),
            lambda saved: torch.empty(saved[0], dtype=saved[1], device="meta"),
        )
