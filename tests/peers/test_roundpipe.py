"""RoundPipe in the loop: exact, and one step stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.helpers.runs import curve, refusal, skip_without

OVERRIDES = ("device=cuda", "precision=bf16", "clip_norm=null", "optimizer.lr=0.01")


def test_on_a_cpu_it_is_refused_in_one_line():
    skip_without("roundpipe")
    assert refusal("offload=roundpipe") == "offload=roundpipe: roundpipe runs on CUDA devices only, and device=cpu"


@pytest.mark.gpu
def test_on_a_gpu_exact_losses_are_the_resident_ones_but_for_rounding(tmp_path: Path):
    skip_without("roundpipe")
    own, expected = curve(tmp_path / "own", "offload=roundpipe", *OVERRIDES), curve(tmp_path / "none", *OVERRIDES)
    assert own[0][0] == expected[0][0]
    assert own == [(pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2)) for loss, norm in expected]


@pytest.mark.gpu
def test_on_a_gpu_stale_losses_are_those_of_one_update_less(tmp_path: Path):
    """The second step computes with the first weights."""
    skip_without("roundpipe")
    own = curve(tmp_path / "own", "offload=roundpipe", "offload.stale=true", *OVERRIDES)
    still = curve(tmp_path / "none", *OVERRIDES, "optimizer.lr=0")
    assert own[1][0] == still[1][0]
    assert own[3][0] != still[3][0]
