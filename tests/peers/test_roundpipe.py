"""RoundPipe in the loop: exact, and one step stale."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.peers.helpers.runs import ON_GPU, curve, skip_without


@pytest.mark.gpu
def test_on_a_gpu_exact_losses_are_the_resident_ones_but_for_rounding(tmp_path: Path):
    skip_without("roundpipe")
    own, expected = curve(tmp_path / "own", "offload=roundpipe", *ON_GPU), curve(tmp_path / "none", *ON_GPU)
    assert own[0][0] == expected[0][0]
    assert own == [(pytest.approx(loss, rel=1e-3), pytest.approx(norm, rel=1e-2)) for loss, norm in expected]


@pytest.mark.gpu
def test_on_a_gpu_stale_losses_are_those_of_one_update_less(tmp_path: Path):
    """The second step computes with the first weights."""
    skip_without("roundpipe")
    own = curve(tmp_path / "own", "offload=roundpipe", "offload.stale=true", *ON_GPU)
    still = curve(tmp_path / "none", *ON_GPU, "optimizer.lr=0")
    assert own[1][0] == still[1][0]
    assert own[3][0] != still[3][0]
