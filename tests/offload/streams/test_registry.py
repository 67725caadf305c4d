"""The streams of a device are made once, shared, counted, and dropped by the last release; waits for several."""

import subprocess
import sys
import time
from contextlib import nullcontext, suppress
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from offload.streams import registry
from offload.streams.registry import Points
from offload.streams.stream_checker import CheckedStream, CheckedStreams, StreamOrderError


def test_streams_are_shared_and_counted():
    first = registry.acquire("cpu")
    second = registry.acquire("cpu")
    assert first is second
    assert registry.holders("cpu") == 2
    registry.release(first)
    assert registry.acquire("cpu") is second
    registry.release(second)
    registry.release(second)
    assert registry.holders("cpu") == 0


def test_the_last_release_drops_them():
    first = registry.acquire("cpu")
    registry.release(first)
    second = registry.acquire("cpu")
    assert second is not first
    with pytest.raises(ValueError, match="released once too often"):
        registry.release(first)
    registry.release(second)


def test_streams_that_nobody_refers_to_are_dropped_without_a_release():
    first = registry.acquire("cpu")
    first_id = first.h2d.clock
    assert registry.holders("cpu") == 1
    del first
    assert registry.holders("cpu") == 0
    second = registry.acquire("cpu")
    assert registry.holders("cpu") == 1
    assert second.h2d.clock is not first_id
    registry.release(second)


def test_a_device_without_streams_is_refused():
    with pytest.raises(ValueError, match="device meta: only cuda and cpu"):
        registry.acquire("meta")


def test_a_gpu_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"^device cuda: torch .* finds no CUDA device: take cpu$"):
        registry.acquire("cuda")


@pytest.mark.slow
def test_importing_the_engine_touches_no_cuda():
    code = (
        "import sys, torch\n"
        "def refuse(*a, **k): raise SystemExit('CUDA was initialised at import')\n"
        "torch.cuda._lazy_init = refuse\n"
        "import offload.modes.bounce_linear, offload.modes.none\n"
        "assert not {'hydra', 'omegaconf', 'wandb', 'models', 'training'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)


class FakeCuda:
    """Stands for torch.cuda: streams are strings, the handle of one is its hash."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.current, self.device_index, self.asked = "default", 0, 0
        monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
        monkeypatch.setattr(torch.cuda, "current_stream", self.current_stream)
        monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: setattr(self, "current", stream))
        monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext("torch's own"))
        monkeypatch.setattr(registry, "current_stream_handle", lambda index: hash(self.current))
        monkeypatch.setattr(registry, "current_device_index", lambda: self.device_index)

    def current_stream(self, device: torch.device) -> str:
        self.asked += 1
        return self.current


def test_the_compute_stream_is_asked_for_once_as_long_as_it_is_current(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(monkeypatch)
    streams = registry.CudaStreams(torch.device("cuda", 0))
    assert streams.compute == streams.compute == "default"
    cuda.current = "another"
    assert streams.compute == "another"
    cuda.current = "default"
    assert streams.compute == "default"
    assert cuda.asked == 2


def test_a_stream_is_current_inside_and_the_one_before_afterwards(monkeypatch: pytest.MonkeyPatch):
    cuda = FakeCuda(monkeypatch)
    streams = registry.CudaStreams(torch.device("cuda", 0))
    with suppress(KeyError), streams.on("side"):
        assert cuda.current == "side"
        with streams.on("inner"):
            assert cuda.current == "inner"
        assert cuda.current == "side"
        raise KeyError
    assert cuda.current == "default"
    # torch's own context changes the device, too.
    cuda.device_index = 1
    with streams.on("side") as entered:
        assert entered == "torch's own"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_of_a_gpu_are_current_as_torch_sees_it():
    streams = registry.CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    default, side = torch.cuda.current_stream(), torch.cuda.Stream()
    assert streams.compute == default
    with torch.cuda.stream(side):
        assert streams.compute == side
        with streams.on(streams.h2d):
            assert streams.compute == torch.cuda.current_stream() == streams.h2d
        assert torch.cuda.current_stream() == side
    assert streams.compute == torch.cuda.current_stream() == default


class Busy:
    """Streams whose compute stream has work left."""

    compute = SimpleNamespace(query=lambda: False)


def test_a_wait_of_the_host_counts_while_the_device_has_no_work():
    wait = partial(time.sleep, 0.002)
    assert registry.device_wait_ms(CheckedStreams(torch.device("cpu")), wait) >= 2
    assert registry.device_wait_ms(Busy(), wait) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_wait_of_the_host_ahead_of_a_gpu_does_not_count():
    streams = registry.CudaStreams(torch.device("cuda", torch.cuda.current_device()))
    torch.cuda.synchronize()
    assert registry.device_wait_ms(streams, partial(time.sleep, 0.02)) >= 20
    # A second, or more.
    torch.cuda._sleep(2 * 10**9)
    assert registry.device_wait_ms(streams, partial(time.sleep, 0.02)) == 0
    torch.cuda.synchronize()


class Part:
    """Something that a stream makes, as the stream checker knows it."""


def test_a_stream_waits_for_what_all_have_made_until_the_mark():
    streams, side = CheckedStreams(torch.device("cpu")), CheckedStream("side")
    points, parts, later = Points(streams), [Part(), Part(), Part()], Part()
    for part, stream in zip(parts, (streams.compute, side, streams.compute), strict=True):
        with streams.on(stream):
            points.note()
            streams.writes(streams.compute, part, "a part")
    points.record()
    streams.writes(streams.compute, later, "what comes later")
    points.hold_up(streams.gather)
    for part in parts:
        streams.reads(streams.gather, part, "a sum")
    with pytest.raises(StreamOrderError):
        streams.reads(streams.gather, later, "a sum")


def test_streams_that_are_forgotten_hold_up_nothing():
    streams, part = CheckedStreams(torch.device("cpu")), Part()
    points = Points(streams)
    points.note()
    streams.writes(streams.compute, part, "a part")
    points.record()
    points.clear()
    points.hold_up(streams.gather)
    with pytest.raises(StreamOrderError):
        streams.reads(streams.gather, part, "a sum")
