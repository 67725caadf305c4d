"""torchao's CPUOffloadOptimizer in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.helpers.runs import curve, refusal

OVERRIDES = ("device=cuda", "precision=bf16", "clip_norm=null", "optimizer.lr=0.01")


def test_on_a_cpu_it_is_refused_in_one_line():
    line = "offload=torchao_optimizer: torchao runs on CUDA devices only, and device=cpu"
    assert refusal("offload=torchao_optimizer") == line


@pytest.mark.gpu
def test_on_a_gpu_the_first_step_is_the_resident_one(tmp_path: Path):
    own = curve(tmp_path / "own", "offload=torchao_optimizer", *OVERRIDES)
    expected = curve(tmp_path / "none", *OVERRIDES)
    assert own[0] == (expected[0][0], pytest.approx(expected[0][1], rel=1e-4))
    assert own[3][0] == pytest.approx(expected[3][0], rel=0.02)
