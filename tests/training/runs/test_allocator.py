"""The setting of torch's allocator: made where the user made none, and in force on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests import ROOT
from training.runs import allocator
from training.runs.failures import explain

NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch: pytest.MonkeyPatch):
    for name in NAMES:
        # Set first, so that the values of before come back.
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def test_segments_expand_where_nothing_is_set():
    assert not allocator.segments_expand()
    allocator.expand_segments()
    assert allocator.segments_expand()
    assert [os.environ.get(name) for name in NAMES] == ["expandable_segments:True", None, None]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("value", "expand"),
    [("expandable_segments:False", False), ("max_split_size_mb:64", False), ("a:1,expandable_segments:True", True)],
)
def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str, value: str, expand: bool):
    monkeypatch.setenv(name, value)
    allocator.expand_segments()
    assert {key: os.environ[key] for key in NAMES if key in os.environ} == {name: value}
    assert allocator.segments_expand() is expand


@pytest.mark.parametrize("expand", [False, True])
def test_too_little_memory_names_the_setting_where_it_is_not_made(monkeypatch: pytest.MonkeyPatch, expand: bool):
    monkeypatch.setenv(NAMES[0], f"expandable_segments:{expand}")
    reason = explain(RuntimeError("CUDA error: out of memory")).reason
    advice = f"; {NAMES[0]}=expandable_segments:True before the command joins free pieces of memory"
    assert reason.endswith(advice) is not expand
    assert ("segments" in reason) is not expand


# What train.py does, and scripts that import torch before they call it.
AS_TRAIN = "from training.runs import allocator; allocator.expand_segments(); import torch"
AS_SCRIPT = "import torch; from training.runs import allocator; allocator.expand_segments()"
SHOW = "torch.ones(1, device='cuda'); print([s['is_expandable'] for s in torch.cuda.memory_snapshot()])"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("start", [AS_TRAIN, AS_SCRIPT])
def test_the_setting_is_in_force_on_a_gpu(start: str):
    command = [sys.executable, "-c", f"{start}; {SHOW}"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    assert shown.stdout == "[True]\n"
