"""DeepSpeed's ZeRO-3 with everything on the host, in the loop."""

from pathlib import Path

import pytest

from tests.peers.helpers.runs import ON_GPU, curve, curve_of_process, skip_without


@pytest.mark.gpu
@pytest.mark.parametrize("super_offload", [False, True])
def test_on_a_gpu_losses_are_the_resident_ones_but_for_rounding(tmp_path: Path, super_offload: bool):
    skip_without("deepspeed")
    asked = ("offload=deepspeed_zero3", f"offload.super_offload={super_offload}")
    # DeepSpeed keeps the process group of its first run.
    own, expected = curve_of_process(tmp_path / "own", *asked, *ON_GPU), curve(tmp_path / "none", *ON_GPU)
    assert own[0][0] == expected[0][0]
    assert own == [(pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2)) for loss, norm in expected]
