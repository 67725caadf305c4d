"""fairscale's OffloadModel in the loop. Its gradients are not compared: they may be wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.helpers.runs import curve, refusal, skip_without

OVERRIDES = ("device=cuda", "precision=bf16", "clip_norm=null", "optimizer.lr=0.01")


def test_on_a_cpu_it_is_refused_in_one_line():
    skip_without("fairscale")
    assert refusal("offload=fairscale") == "offload=fairscale: fairscale runs on CUDA devices only, and device=cpu"


@pytest.mark.gpu
def test_on_a_gpu_it_runs_to_its_end(tmp_path: Path):
    skip_without("fairscale")
    assert len(curve(tmp_path, "offload=fairscale", *OVERRIDES)) == 4
