"""torchao's CPUOffloadOptimizer in the loop."""

from pathlib import Path

import pytest

from tests.peers.helpers.runs import ON_GPU, curve


@pytest.mark.gpu
def test_on_a_gpu_the_first_step_is_the_resident_one(tmp_path: Path):
    own = curve(tmp_path / "own", "offload=torchao_optimizer", *ON_GPU)
    expected = curve(tmp_path / "none", *ON_GPU)
    assert own[0] == (expected[0][0], pytest.approx(expected[0][1], rel=1e-4))
    assert own[3][0] == pytest.approx(expected[3][0], rel=0.02)
