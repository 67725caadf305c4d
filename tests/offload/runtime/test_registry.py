"""The streams of a device are made once, shared, counted, and dropped by the last release."""

from __future__ import annotations

import subprocess
import sys

import pytest

from offload.runtime import registry


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


@pytest.mark.slow
def test_importing_the_engine_touches_no_cuda():
    code = (
        "import sys, torch\n"
        "def refuse(*a, **k): raise SystemExit('CUDA was initialised at import')\n"
        "torch.cuda._lazy_init = refuse\n"
        "import offload.modes.bounce_linear, offload.modes.none\n"
        "assert not {'hydra', 'omegaconf', 'wandb', 'models', 'training'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
