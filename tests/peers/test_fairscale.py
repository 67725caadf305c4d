"""fairscale's OffloadModel in the loop. Its gradients are not compared: they may be wrong."""

from pathlib import Path

import pytest

from tests.peers.helpers.runs import ON_GPU, curve, skip_without


@pytest.mark.gpu
def test_on_a_gpu_it_runs_to_its_end(tmp_path: Path):
    skip_without("fairscale")
    assert len(curve(tmp_path, "offload=fairscale", *ON_GPU)) == 4
