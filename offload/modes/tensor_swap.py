"""tensor_swap: tensors saved for backward wait on the host, the idea of MindSpeed's swap-attention and of vDNN.

Another mode decides where the weights live: resident, or streamed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

from torch import Tensor, nn

from offload.activations.policy import AutomaticBudget, FixedBudget
from offload.activations.swapper import ActivationSwapper
from offload.knobs import nbytes, refuse_part
from offload.memory.host_memory import HostArena
from offload.modes.activation_mode import ActivationMode, MovedActivations
from offload.modes.mode import NO_OPTIONS, AttachOptions
from offload.streams.registry import Streams
from offload.streams.transfer import Counters, Telemetry, Transfer
from offload.torch_private.module_contexts import OneThread
from offload.torch_private.torch_internals import tree_leaves
from offload.weights.footprint import Footprint

# Smaller tensors stay on the device: a copy of theirs takes the host longer than it is worth.
MIN_BYTES = 2**20
# Bytes of copies out that may be under way. Backward starts with the tensors saved last, so more only costs memory.
IN_FLIGHT_BYTES = 512 * 2**20
# Bytes that may be back on the device ahead of use.
PREFETCH_BYTES = 512 * 2**20


@dataclass(kw_only=True, eq=False)
class TensorSwap(ActivationMode):
    """Swaps activations, over a mode of the weights.

    Args:
        weights: the mode of the weights, such as Resident() or LayerStream().
        budget: bytes that may stay on the device besides (0, 8GiB), those that backward uses first; or auto: as much as
            the copies could not hide behind compute, which the first steps find out.
    """

    budget: str | int = nbytes(0, or_else="auto")

    def footprint(self, model: nn.Module, recompute: bool = False, options: AttachOptions = NO_OPTIONS) -> Footprint:
        budget = None if self.budget == "auto" else self.budget
        return replace(super().footprint(model, recompute, options), activation_budget_bytes=budget)

    def activations(self, model: nn.Module, streams: Streams) -> SwappedActivations:
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            refuse_part(name, tensor)
        return SwappedActivations(
            model, streams, AutomaticBudget() if self.budget == "auto" else FixedBudget(self.budget)
        )


class SwappedActivations(MovedActivations):
    """Activations that an `ActivationSwapper` moves."""

    def __init__(self, model: nn.Module, streams: Streams, policy: FixedBudget):
        self._model = model
        self._one_thread = OneThread()
        self._telemetry = Telemetry(streams)
        self._arena = HostArena(streams.device)
        self._swapper = ActivationSwapper(
            Transfer(streams, self._telemetry),
            self._arena,
            min_bytes=MIN_BYTES,
            in_flight_bytes=IN_FLIGHT_BYTES,
            prefetch_bytes=PREFETCH_BYTES,
            policy=policy,
        )
        super().__init__(model)

    def around_step(self) -> AbstractContextManager:
        return self._swapper.step(kept=(*self._model.parameters(), *self._model.buffers()))

    @contextmanager
    def around_forward(self, arguments: tuple, keywords: Mapping) -> Iterator[None]:
        # The caller has the arguments in any case, so that a copy of theirs would free nothing.
        leaves = tree_leaves((arguments, keywords))
        kept = self._swapper.excluding(leaf for leaf in leaves if isinstance(leaf, Tensor))
        with self._one_thread.turn(), kept, self._swapper.hooks():
            yield

    def close(self) -> None:
        self._swapper.close()
        self._arena.close()

    def counters(self) -> Counters:
        self._telemetry.collect()
        into, out = self._telemetry.h2d_bytes, self._telemetry.d2h_bytes
        return Counters(
            h2d_bytes=into,
            d2h_bytes=out,
            activation_h2d_bytes=into,
            activation_d2h_bytes=out,
            stall_ms=self._telemetry.stall_ms,
            swapped_bytes=self._swapper.swapped_bytes,
            released_bytes=self._swapper.released_bytes,
            host_pinned_bytes=self._arena.pinned_bytes,
            host_pageable_bytes=self._arena.pageable_bytes,
        )
