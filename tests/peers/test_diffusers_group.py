"""Group offloading of diffusers computes the loss of each step, forward only."""

from pathlib import Path

import pytest

from tests.peers.helpers.runs import curve, notes


@pytest.mark.parametrize("blocks", [1, 2])
@pytest.mark.slow
def test_losses_are_those_of_the_first_weights(tmp_path: Path, blocks: int):
    own = curve(tmp_path / "group", "offload=diffusers_group", f"offload.blocks={blocks}", "clip_norm=null")
    still = curve(tmp_path / "none", "optimizer.lr=0", "clip_norm=null")
    assert [loss for loss, _ in own] == [loss for loss, _ in still]
    assert {norm for _, norm in own} == {0.0}
    assert notes(tmp_path / "group") == ["forward only: a step has no gradients and no update"]


@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path):
    overrides = ("device=cuda", "precision=bf16", "clip_norm=null")
    own = curve(tmp_path / "group", "offload=diffusers_group", *overrides)
    still = curve(tmp_path / "none", "optimizer.lr=0", *overrides)
    assert [loss for loss, _ in own] == [loss for loss, _ in still]
