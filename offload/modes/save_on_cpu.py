"""save_on_cpu: torch's own `torch.autograd.graph.save_on_cpu` around the model, a baseline to compare with.

It copies every saved tensor when it is saved, parameters too, and back when it is used, on the stream that computes.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks

from offload.activation_mode import ActivationMode, Mode
from offload.regions import Opener
from offload.registry import Streams
from offload.weight_mode import one_of


class SaveOnCpu(ActivationMode):
    """Saved tensors wait on the host, weights are `weights`'s. `pin` is "auto" (page-lock host memory) or "off".

    Its copies are torch's, so no counter has them, except in a rehearsal on the meta device.
    """

    def __init__(self, weights: Mode, pin: str = "auto"):
        super().__init__(weights)
        self._pin = one_of("pin", pin, "auto", "off") == "auto" and torch.cuda.is_available()

    def openers(self, model: nn.Module) -> Iterable[tuple[nn.Module, Opener]]:
        yield model, lambda arguments, keywords: self._hooks()

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Takes `model` over. Raises RuntimeError when a model is attached already, and what `weights` raises."""
        super().attach(model, streams)
        self._rehearsal = _ImaginedCopies() if streams.device.type == "meta" else None

    def counters(self) -> dict[str, float]:
        """Those of the weights; in a rehearsal also what would wait on the host, and be waited for."""
        counters = super().counters()
        if self._rehearsal is not None:
            counters["host_pageable_bytes"] += self._rehearsal.saved_bytes
            counters["waited_for_bytes"] = self._rehearsal.copied_bytes
        return counters

    def _hooks(self) -> AbstractContextManager:
        return save_on_cpu(pin_memory=self._pin) if self._rehearsal is None else self._rehearsal.hooks()


class _ImaginedCopies:
    """What torch's save_on_cpu would copy of meta tensors, which have no bytes to copy."""

    def __init__(self) -> None:
        self.copied_bytes = 0
        self.saved_bytes = 0
        self._waiting_bytes = 0

    def hooks(self) -> AbstractContextManager:
        return saved_tensors_hooks(self._pack, self._unpack)

    def _pack(self, tensor: Tensor) -> tuple[torch.Size, torch.dtype]:
        self.copied_bytes += tensor.nbytes
        self._waiting_bytes += tensor.nbytes
        self.saved_bytes = max(self.saved_bytes, self._waiting_bytes)
        return tensor.shape, tensor.dtype

    def _unpack(self, saved: tuple[torch.Size, torch.dtype]) -> Tensor:
        tensor = torch.empty(saved[0], dtype=saved[1], device="meta")
        self.copied_bytes += tensor.nbytes
        self._waiting_bytes -= tensor.nbytes
        return tensor
