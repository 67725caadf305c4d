"""none: everything resident, the reference for numbers and for speed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor, nn

from offload.microbatches.layer_major import one_after_another
from offload.optimizer.adamw import HostAdamW
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint
from offload.weights.partition import cut
from offload.weights.units import DevicePlacement


class Resident:
    """Parameters, gradients and buffers stay on the device; a step moves nothing."""

    recomputes = False

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint:
        """What `attach` will hold and a step will move, in bytes; touches nothing."""
        return Footprint.of(cut(model, []), slots=0, recompute=recompute)

    def attach(self, model: nn.Module, streams: Streams) -> None:
        """Moves `model` to the device of `streams`; meta parameters become uninitialised device memory."""
        self._placement = DevicePlacement(cut(model, []).resident, streams.device)

    def step(self, norms: bool = False) -> AbstractContextManager:
        return nullcontext()

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]:
        """None: the gradients are on the device, for everyone to read."""
        return {}

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]:
        """Inside a step: computes every loss and the gradients of all. Returns the losses, detached."""
        return one_after_another(losses)

    def overlap(self, optimizer: HostAdamW, early: bool, device_share: int = 0) -> None:
        """Nothing to do: the parameters are on the device, and so are their states and updates."""

    def place_states(self, nbytes: int) -> None:
        """Nothing to do: they are on the device."""

    def detach(self) -> None:
        self._placement.restore()

    def counters(self) -> dict[str, float]:
        return {
            "h2d_bytes": 0,
            "d2h_bytes": 0,
            "stall_ms": 0.0,
            "host_pinned_bytes": 0,
            "host_pageable_bytes": 0,
        }
