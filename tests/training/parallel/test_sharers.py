"""Ranks that share the homes of what streams compute what one device does with as many microbatches."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.training.helpers.in_process import components_of, composed, run_here
from tests.training.helpers.results import content
from tests.training.parallel.conftest import RUN, run_ranks
from training.config.validation import check
from training.errors import UserError
from training.parallel import group
from training.parallel.ranks import RankLostError, Share


def at(run_dir: Path, step: int) -> Path:
    return run_dir / "checkpoints" / f"step-{step:08d}"


STREAMED = ("offload=layer_stream", "optimizer=host_adamw", "parallel.homes=shared")


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of six steps on one device, with two microbatches."""
    folder = tmp_path_factory.mktemp("shared") / "one"
    run_here(folder, *RUN, "optimizer=host_adamw", "microbatches=2")
    return folder


@pytest.fixture(scope="module")
def two(one: Path) -> Path:
    """The same run from its third step to its fourth, on two devices that share the weights."""
    folder = one.with_name("two")
    run_ranks(folder, *STREAMED, "devices=2", "microbatches=1", f"resume={at(one, 2)}", "steps=4")
    return folder


def test_two_ranks_that_share_weights_compute_what_one_device_does(one: Path, two: Path):
    assert content(at(two, 4)) == content(at(one, 4))


@pytest.mark.slow
def test_another_rank_that_fails_ends_the_run_which_is_not_saved(tmp_path: Path, monkeypatch, capfd):
    # Tokens that are in no vocabulary, on the other rank, from the second step on.
    wrong = torch.full((2, 33), 10**6)
    own = group._own_memory
    steps = []

    def second_step_wrong(share: Share) -> Share:
        steps.append(share)
        return own(share) if len(steps) == 1 else Share(wrong, share.examples, share.first)

    monkeypatch.setattr(group, "_own_memory", second_step_wrong)
    with pytest.raises(RankLostError, match=r"^rank 1: its process has ended"):
        run_ranks(tmp_path, *STREAMED, "devices=2", "microbatches=1", "eval.every=null", "checkpoint.every=5")
    assert "rank 1: error: IndexError" in capfd.readouterr().err
    # The step before is done on this rank, and perhaps in part on the other.
    assert not (tmp_path / "checkpoints").exists()


def test_states_on_the_device_are_refused_for_ranks_that_share_them():
    with pytest.raises(UserError, match=r"^optimizer.device_share=1GiB with devices=2: .* parallel.homes=own"):
        components_of(*STREAMED, "devices=2", "optimizer.device_share=1GiB")
    assert components_of(*STREAMED, "devices=2", "optimizer.device_share=auto").shares_homes
    assert not components_of(*STREAMED, "offload=none", "devices=2", "optimizer.device_share=1GiB").shares_homes
    assert not components_of(*STREAMED[:2], "devices=2", "optimizer.device_share=1GiB").shares_homes
    assert not components_of(*STREAMED).shares_homes


def test_states_in_8_bits_are_refused_for_ranks_that_share_them():
    with pytest.raises(UserError, match=r"^optimizer.state_dtype=int8 with parallel.homes=shared: .*homes=own$"):
        components_of(*STREAMED, "devices=2", "optimizer.state_dtype=int8")


def test_ranks_of_several_hosts_cannot_share():
    with pytest.raises(UserError, match=r"^parallel.homes=shared with parallel.hosts=2: .* give parallel.homes=own$"):
        check(composed(*STREAMED, "devices=2", "parallel.hosts=2", "plan=true")[0])


@pytest.mark.slow
def test_three_ranks_share_units_of_all_sizes(one: Path):
    """Four sequences, so that the first rank has two."""
    expected, folder = one.with_name("in thirds"), one.with_name("three")
    run_here(expected, *RUN, "optimizer=host_adamw", "microbatches=3", "steps=2")
    run_ranks(folder, *STREAMED, "offload.outside=stream", "devices=3", "microbatches=1", "steps=2")
    assert content(at(folder, 2)) == content(at(expected, 2))


@pytest.mark.slow
def test_ranks_share_a_quantised_base_and_sum_the_adapter_s_gradients(one: Path):
    expected, folder = one.with_name("adapter"), one.with_name("adapter on two")
    adapter = ("adapter=lora", "adapter.rank=2", "quantize=int8", "optimizer=host_adamw", "steps=2")
    run_here(expected, *RUN, *adapter, "microbatches=2")
    run_ranks(folder, *RUN, *adapter, "offload=layer_stream", "parallel.homes=shared", "devices=2", "microbatches=1")
    assert content(at(folder, 2)) == content(at(expected, 2))


@pytest.mark.slow
def test_microbatches_of_a_rank_are_added_before_the_ranks_are(tmp_path: Path):
    keys = (*STREAMED, "devices=2", "microbatches=2", "steps=3", "parallel.reduction=fast")
    for homes in ("shared", "own"):
        run_ranks(tmp_path / homes, *keys, f"parallel.homes={homes}")
    assert content(at(tmp_path / "shared", 3)) == content(at(tmp_path / "own", 3))


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("mode", ["layer_stream", "bounce_linear", "shard_offload"])
@pytest.mark.parametrize("homes", ["shared", "own"])
def test_two_gpus_compute_what_one_does(tmp_path: Path, mode: str, homes: str):
    """In processes of their own: this one must not have begun to use a GPU."""
    common = [*RUN, "device=auto", "optimizer=host_adamw", f"offload={mode}", "steps=4", "precision=bf16"]
    two = ["devices=2", "microbatches=1", f"parallel.homes={homes}"]
    for name, keys in {"one": ["microbatches=2"], "two": two}.items():
        command = [sys.executable, "train.py", *common, *keys, f"hydra.run.dir={tmp_path / name}"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stderr
    assert content(at(tmp_path / "two", 4)) == content(at(tmp_path / "one", 4))


def test_a_run_moves_to_ranks_that_share_weights_and_back(one: Path, two: Path):
    back = one.with_name("back")
    run_here(back, *RUN, *STREAMED, "microbatches=2", f"resume={two}")
    assert content(at(back, 6)) == content(at(one, 6))
