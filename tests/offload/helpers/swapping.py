"""An activation swapper without a mode, and an operation that saves the tensors that it is given."""

import torch

from offload.activations.swapper import ActivationSwapper
from offload.memory.host_memory import HostArena
from offload.streams import registry
from offload.streams.transfer import Telemetry, Transfer


class Swap(ActivationSwapper):
    """A swapper with an arena of its own, which keeps only the newest tensor while it is copied out."""

    def __init__(self, streams: registry.Streams, **options):
        self.telemetry = Telemetry(streams)
        self.arena = HostArena(streams.device)
        defaults = {"min_bytes": 1, "in_flight_bytes": 0, "prefetch_bytes": 1 << 20}
        super().__init__(Transfer(streams, self.telemetry), self.arena, **(defaults | options))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden):
        return hidden.clone()

    @staticmethod
    def backward(ctx, gradient):
        raise ZeroDivisionError


class Save(torch.autograd.Function):
    """Saves `tensors`. Backward appends to `seen` the tensors as it finds them."""

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
    """Saves `tensors` under the hooks of `swap`. Returns a scalar, and the list to which its backward appends them."""
    seen = []
    scale = torch.ones((), requires_grad=True)
    with swap.hooks():
        saved = Save.apply(scale, seen, *tensors)
        if flush:
            # One more is copied out, because the deferred frees always keep the newest.
            saved = Save.apply(saved, [], torch.zeros(1))
    return saved, seen
