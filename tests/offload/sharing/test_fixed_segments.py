"""Fixed segments where they would grow, and the settings of before afterwards."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from offload.sharing.fixed_segments import fixed_segments
from offload.torch_private import torch_internals
from tests import ROOT


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize("settings", ["", "max_split_size_mb:512", "max_split_size_mb:512,expandable_segments:True"])
def test_segments_are_fixed_where_they_grow(monkeypatch: pytest.MonkeyPatch, name: str, settings: str):
    made = []
    for variable in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, settings)
    monkeypatch.setattr(torch_internals, "set_allocator", made.append)
    grow = "expandable" in settings

    def fail() -> None:
        assert made == ["expandable_segments:False"] * grow
        raise ValueError("inside")

    with pytest.raises(ValueError, match="inside"), fixed_segments():
        fail()
    assert made == ["expandable_segments:False", settings] * grow


FIXED = """
import torch
from offload.sharing.fixed_segments import fixed_segments
torch.ones(2**25, device="cuda")
with fixed_segments(), torch.cuda.use_mem_pool(pool := torch.cuda.MemPool()):
    inside = torch.ones(2**24, device="cuda")
after = torch.ones(2**26, device="cuda")
def grows(tensor):
    for segment in torch.cuda.memory_snapshot():
        if segment["address"] <= tensor.data_ptr() < segment["address"] + segment["total_size"]:
            return segment["is_expandable"]
print(grows(inside), grows(after))
"""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_that_memory_alone_is_in_fixed_segments():
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    command = [sys.executable, "-W", "error", "-c", FIXED]
    shown = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=120)
    assert (shown.stdout, shown.returncode) == ("False True\n", 0), shown.stderr
