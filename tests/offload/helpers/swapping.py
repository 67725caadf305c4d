"""An offloader of activations by itself, and an operation that saves what it is told to."""

from __future__ import annotations

import torch

from offload.activations.swapper import ActivationSwapper
from offload.modes.none import Resident
from offload.modes.tensor_swap import TensorSwap
from offload.runtime import registry
from offload.runtime.host_memory import HostArena
from offload.runtime.transfer import Telemetry, Transfer


class Swap(ActivationSwapper):
    """An offloader with an arena of its own, which forgets memory on its way out at once."""

    def __init__(self, streams: registry.Streams, **options):
        self.telemetry = Telemetry(streams)
        self.arena = HostArena(streams.device)
        defaults = {"min_bytes": 1, "in_flight_bytes": 0, "prefetch_bytes": 1 << 20}
        super().__init__(Transfer(streams, self.telemetry), self.arena, **(defaults | options))


class Save(torch.autograd.Function):
    """Saves the tensors after the first; `seen` gets what backward finds of them."""

    @staticmethod
    def forward(ctx, scale, seen, *tensors):
        ctx.save_for_backward(*tensors)
        ctx.seen, ctx.count = seen, len(tensors)
        return scale.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.saved_tensors)
        return gradient, None, *[None] * ctx.count


def save(swap: Swap, *tensors: torch.Tensor, flush: bool = True) -> tuple[torch.Tensor, list]:
    """A scalar whose backward appends the saved tensors to the list."""
    seen = []
    scale = torch.ones((), requires_grad=True)
    with swap.hooks():
        saved = Save.apply(scale, seen, *tensors)
        if flush:
            # One more on its way: the queue of what is leaving always keeps the last.
            saved = Save.apply(saved, [], torch.zeros(1))
    return saved, seen


def swapping(weights=None, **knobs) -> TensorSwap:
    """A mode that swaps all it may, and fetches little of it ahead."""
    return TensorSwap(weights or Resident(), **({"min_bytes": 1, "prefetch": 2000} | knobs))
