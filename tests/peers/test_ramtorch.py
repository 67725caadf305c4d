"""RamTorch's OffloadModel trains in the loop: equal in float32, by rounding apart in bf16."""

from pathlib import Path

import pytest

from tests.peers.helpers.runs import curve, notes, skip_without


@pytest.fixture(autouse=True)
def installed():
    skip_without("ramtorch")


@pytest.mark.parametrize("backward", ["checkpoint", "recompute", "keep"])
def test_the_curve_in_float32_is_the_resident_one(tmp_path: Path, backward: str):
    overrides = ("precision=fp32", "microbatches=2")
    own = curve(tmp_path / "ramtorch", "offload=ramtorch", f"offload.backward={backward}", *overrides)
    assert own == curve(tmp_path / "none", *overrides)


def test_without_masters_the_first_update_is_another(tmp_path: Path):
    overrides = ("precision=bf16", "clip_norm=null", "optimizer.lr=0.1")
    own = curve(tmp_path / "ramtorch", "offload=ramtorch", "offload.masters=none", *overrides)
    expected = curve(tmp_path / "none", *overrides)
    assert own[0] == expected[0]
    assert own[1:] != expected[1:]
    assert notes(tmp_path / "ramtorch") == ["without float32 masters: AdamW computes in the precision of the weights"]


@pytest.mark.gpu
def test_on_a_gpu_without_masters_the_first_step_is_the_resident_one(tmp_path: Path):
    overrides = ("device=cuda", "precision=bf16", "clip_norm=null")
    own = curve(tmp_path / "own", "offload=ramtorch", "offload.masters=none", *overrides)
    assert own[0] == (pytest.approx(curve(tmp_path / "none", *overrides)[0][0], rel=1e-6), own[0][1])


@pytest.mark.gpu
def test_on_a_gpu_autocast_is_close_to_the_resident_run(tmp_path: Path):
    overrides = ("device=cuda", "precision=bf16", "clip_norm=null")
    own, expected = curve(tmp_path / "own", "offload=ramtorch", *overrides), curve(tmp_path / "none", *overrides)
    assert [loss for loss, _ in own] == [pytest.approx(loss, rel=1e-2) for loss, _ in expected]
