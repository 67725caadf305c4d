"""Fixtures for the engine's tests: streams of the CPU, a swapper, and settings for exact or delayed GPU streams."""

import os
import re
from collections.abc import Iterator

import pytest
import torch
from torch.utils.checkpoint import set_checkpoint_early_stop

from offload.modes import tensor_swap
from offload.streams import registry
from offload.weights.units import partition
from tests.offload.helpers.late import make_late, poison_slots
from tests.offload.helpers.sharers import use_collectives
from tests.offload.helpers.small import swap_small
from tests.offload.helpers.swapping import Swap


@pytest.fixture
def streams() -> Iterator[registry.Streams]:
    streams = registry.acquire("cpu")
    yield streams
    registry.release(streams)


@pytest.fixture
def swap(streams: registry.Streams) -> Swap:
    return Swap(streams)


@pytest.fixture(params=["collectives", "copies"])
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The ways in which devices of sharers exchange slices."""
    if request.param == "collectives":
        use_collectives(monkeypatch)
    return request.param


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the measurement of kernels short, and small activations leave the device."""
    swap_small(monkeypatch)


@pytest.fixture
def exact_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Selects kernels that repeat bit for bit, and works around two limits of TORCH_CUDA_SANITIZER=1.

    torch ends a recompute early by raising an exception. The sanitizer's hooks fail if CUDA events are freed during
    that, so recomputes run to their end here. The sanitizer also treats `Tensor.set_` as a write to memory, although
    it moves no data; here it is registered as a function that only creates a tensor.
    """
    cudnn = torch.backends.cudnn
    # Not by assignment: once torch.testing is imported, which other tests do, torch refuses that.
    flags = {"enabled": cudnn.enabled, "benchmark": cudnn.benchmark, "allow_tf32": cudnn.allow_tf32}
    if os.environ.get("TORCH_CUDA_SANITIZER"):
        # Not at the top: importing it enables its tracing.
        from torch.cuda import _sanitizer

        makes_tensors = re.compile(f"{_sanitizer.FACTORY_FUNCTION_REGEX.pattern}|aten::set_$")
        monkeypatch.setattr(_sanitizer, "FACTORY_FUNCTION_REGEX", makes_tensors)
    early_stop = not os.environ.get("TORCH_CUDA_SANITIZER")
    with cudnn.flags(**flags, deterministic=True), set_checkpoint_early_stop(early_stop):
        yield


@pytest.fixture
def poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fills each slot with NaN when its unit leaves it."""
    poison_slots(monkeypatch)


@pytest.fixture(params=["nobody", "h2d", "d2h", "compute"])
def delayed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Delays one stream, or none."""
    make_late(monkeypatch, request.param)


@pytest.fixture(autouse=True)
def small_things_move(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets bounce_linear cut the tiny models of the tests into layers, and tensor_swap swap their tensors.

    Few of these come back at a time.
    """
    monkeypatch.setattr(partition, "SMALL_BYTES", 0)
    monkeypatch.setattr(tensor_swap, "MIN_BYTES", 1)
    monkeypatch.setattr(tensor_swap, "PREFETCH_BYTES", 2000)
