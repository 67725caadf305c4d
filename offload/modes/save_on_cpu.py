"""save_on_cpu: torch's own `torch.autograd.graph.save_on_cpu` around the model, a baseline to compare with.

It copies every saved tensor when it is saved, parameters too, and back when it is used, on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from offload.modes.activation_mode import ActivationMode
from offload.modes.mode import Mode
from offload.modes.weight_mode import one_of
from offload.runtime.module_contexts import Opener
from offload.runtime.registry import Streams


class SaveOnCpu(ActivationMode):
    """Saved tensors wait on the host, weights are `weights`'s. `pin` is "auto" (page-lock host memory) or "off".

    Its copies are torch's. Their bytes are counted where tensors go to its hooks and come back; how long compute waits
    for them nobody times, so no counter has it. On the CPU, where torch has nothing to copy, the bytes are those that a
    device would.
    """

    def __init__(self, weights: Mode, pin: str = "auto"):
        super().__init__(weights)
        self._pin = one_of("pin", pin, "auto", "off") == "auto" and torch.cuda.is_available()

    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        yield model, lambda arguments, keywords: self._copies.hooks()

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over. Raises RuntimeError when a model is attached already, and what `weights` raises."""
        super().attach(model, streams)
        self._rehearses = streams.device.type == "meta"
        self._copies = _CountedCopies(_Imagined() if self._rehearses else save_on_cpu(pin_memory=self._pin))

    def counters(self) -> dict[str, float]:
        """Those of the weights and the bytes of saved tensors in one, without `stall_ms`; all that is copied of these
        is waited for. In a rehearsal also what would wait on the host."""
        counters = super().counters()
        del counters["stall_ms"]
        into, out = self._copies.in_bytes, self._copies.out_bytes
        for prefix in ("", "activation_"):
            counters[f"{prefix}h2d_bytes"] = counters.get(f"{prefix}h2d_bytes", 0) + into
            counters[f"{prefix}d2h_bytes"] = counters.get(f"{prefix}d2h_bytes", 0) + out
        counters["waited_for_bytes"] = into + out
        if self._rehearses:
            counters["host_pageable_bytes"] += self._copies.most_waiting_bytes
        return counters


class _CountedCopies:
    """What goes out by the pack hook of `hooks` and comes back by its unpack hook, and how much waits at most."""

    def __init__(self, hooks: saved_tensors_hooks):
        self.out_bytes = self.in_bytes = 0
        self.most_waiting_bytes = 0
        self._waiting_bytes = 0
        self._hooks = hooks

    def hooks(self) -> AbstractContextManager:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> object:
        self.out_bytes += tensor.nbytes
        self._waiting_bytes += tensor.nbytes
        self.most_waiting_bytes = max(self.most_waiting_bytes, self._waiting_bytes)
        return self._hooks.pack_hook(tensor)

    def _unpack(self, packed: object) -> Tensor:
        tensor = self._hooks.unpack_hook(packed)
        self.in_bytes += tensor.nbytes
        self._waiting_bytes -= tensor.nbytes
        return tensor


class _Imagined(saved_tensors_hooks):
    """torch's save_on_cpu for meta tensors, which have no bytes to copy."""

    def __init__(self) -> None:
        super().__init__(
            lambda tensor: (tensor.shape, tensor.dtype),
            lambda saved: torch.empty(saved[0], dtype=saved[1], device="meta"),
        )
