"""Makes streams late on purpose, and fills freed slots with NaN, so that a missing wait shows in the numbers."""

import pytest
import torch

from offload.streams.transfer import Transfer
from offload.weights.prefetching.prefetcher import Prefetcher
from offload.weights.prefetching.slot_contents import SlotContents
from tests.offload.helpers.models import stack_inputs

ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("exact_on_a_gpu"),
]

# About half a millisecond: longer than the host needs to queue a whole small step's next operation.
DELAY_CYCLES = 1_000_000


def gpu_inputs(step: int, microbatch: int) -> torch.Tensor:
    """Returns the inputs of `stack_inputs`, on the GPU."""
    return stack_inputs(step, microbatch, "cuda")


def make_late(monkeypatch: pytest.MonkeyPatch, late: str) -> None:
    """Spinning kernels go before the work of the stream `late`: "h2d", "d2h", "compute" (or "nobody")."""
    copy, fetch, await_on = Transfer._copy, Prefetcher.fetch, Transfer.await_on

    def late_copy(self, pairs, stream, name):
        if stream is getattr(self.streams, late, None):
            with self.streams.on(stream):
                torch.cuda._sleep(DELAY_CYCLES)
        return copy(self, pairs, stream, name)

    def late_fetch(self, unit, **options):
        slot = fetch(self, unit, **options)
        if late == "compute":
            torch.cuda._sleep(DELAY_CYCLES)
        return slot

    def late_await(self, stream, event):
        await_on(self, stream, event)
        if late == "compute":
            torch.cuda._sleep(DELAY_CYCLES)

    monkeypatch.setattr(Transfer, "_copy", late_copy)
    monkeypatch.setattr(Prefetcher, "fetch", late_fetch)
    monkeypatch.setattr(Transfer, "await_on", late_await)


def poison_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills each slot with NaN when its unit leaves it."""
    original = SlotContents.__init__

    def poisoning(self, slots, transfer, poison, filler):
        original(self, slots, transfer, True, filler)

    monkeypatch.setattr(SlotContents, "__init__", poisoning)
