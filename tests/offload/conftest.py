"""Fixtures of several files: streams of the CPU, swapping by itself, and a GPU made late and exact."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from offload.runtime import registry
from offload.weights.prefetcher import Prefetcher
from tests.offload.helpers.late import make_late
from tests.offload.helpers.swapping import Swap


@pytest.fixture
def streams() -> Iterator[registry.Streams]:
    streams = registry.acquire("cpu")
    yield streams
    registry.release(streams)


@pytest.fixture
def swap(streams: registry.Streams) -> Swap:
    return Swap(streams)


@pytest.fixture
def exact_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Kernels that repeat bit for bit; under TORCH_CUDA_SANITIZER=1, recomputes run to their end.

    torch ends them early by an exception; the sanitizer's hooks fail when CUDA events are freed while one is raised.
    The sanitizer also takes `Tensor.set_`, which moves no data, for a write to the memory that the tensor views then;
    it is told that this only makes a tensor.
    """
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        # Not at the top: importing it switches its tracing on.
        from torch.cuda import _sanitizer

        makes_tensors = re.compile(f"{_sanitizer.FACTORY_FUNCTION_REGEX.pattern}|aten::set_$")
        monkeypatch.setattr(_sanitizer, "FACTORY_FUNCTION_REGEX", makes_tensors)
    with set_checkpoint_early_stop(not os.environ.get("TORCH_CUDA_SANITIZER")):
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that a unit leaves are filled with NaN."""
    original = Prefetcher.__init__

    def poisoning(self, units, slots, transfer, prefetch, poison):
        original(self, units, slots, transfer, prefetch, True)

    monkeypatch.setattr(Prefetcher, "__init__", poisoning)


@pytest.fixture(params=["nobody", "h2d", "d2h", "compute"])
def delayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """One stream runs late, the others do not."""
    make_late(monkeypatch, request.param)
