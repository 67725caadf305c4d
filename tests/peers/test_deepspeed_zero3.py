"""DeepSpeed's ZeRO-3 with everything on the host, in the loop."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.helpers.runs import curve, refusal, skip_without

OVERRIDES = ("device=cuda", "precision=bf16", "clip_norm=null", "optimizer.lr=0.01")


def test_on_a_cpu_it_is_refused_in_one_line():
    skip_without("deepspeed")
    assert (
        refusal("offload=deepspeed_zero3")
        == "offload=deepspeed_zero3: deepspeed runs on CUDA devices only, and device=cpu"
    )


@pytest.mark.gpu
@pytest.mark.parametrize("super_offload", [False, True])
def test_on_a_gpu_losses_are_the_resident_ones_but_for_rounding(tmp_path: Path, super_offload: bool):
    skip_without("deepspeed")
    asked = ("offload=deepspeed_zero3", f"offload.super_offload={super_offload}")
    own, expected = curve(tmp_path / "own", *asked, *OVERRIDES), curve(tmp_path / "none", *OVERRIDES)
    assert own[0][0] == expected[0][0]
    assert own == [(pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2)) for loss, norm in expected]
