"""The contract of an offload mode."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn

from offload.optimizer.adamw import HostAdamW
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint


class Mode(Protocol):
    """The contract of a mode; see docs/architecture.md."""

    recomputes: bool

    def footprint(self, model: nn.Module, recompute: bool = False) -> Footprint: ...

    def attach(self, model: nn.Module, streams: Streams) -> None: ...

    def step(self, norms: bool = False) -> AbstractContextManager: ...

    def gradient_norms(self) -> dict[nn.Parameter, Tensor]: ...

    def overlap(self, optimizer: HostAdamW, early: bool, device_share: int = 0) -> None: ...

    def place_states(self, nbytes: int) -> None: ...

    def accumulate(self, losses: Sequence[Callable[[], Tensor]]) -> list[Tensor]: ...

    def detach(self) -> None: ...

    def counters(self) -> dict[str, float]: ...
