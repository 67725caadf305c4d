"""The ranks that follow: what goes wrong on one of them reaches the user, and torchrun may start them."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.training.helpers.in_process import components_of, run_here
from tests.training.helpers.results import content
from tests.training.parallel.conftest import RUN, run_ranks
from training.errors import UserError
from training.parallel import group
from training.parallel.ranks import RankLostError
from training.planning import plan
from training.run import loop
from training.settle.settled import KEPT

TWO = ("devices=2", "microbatches=1", "eval.every=null")


@pytest.mark.slow
def test_an_error_on_another_rank_is_told_by_the_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd):
    # Tokens that are in no vocabulary.
    wrong = torch.full((2, 33), 10**6)
    monkeypatch.setattr(group, "_own_memory", lambda share: replace(share, parts=(wrong,)))
    with pytest.raises(RankLostError, match=r"^rank 1: IndexError: index out of range"):
        run_ranks(tmp_path, *TWO, new_processes=True)
    # What the user cannot fix has a traceback, with the name of its rank.
    assert "\nrank 1: Traceback" in "\n" + capfd.readouterr().err


@pytest.mark.parametrize(
    "keys", [("offload=layer_stream",), pytest.param(("parallel.sequence=2",), marks=pytest.mark.slow)]
)
def test_one_that_cannot_build_its_part_is_told_by_the_first(keys, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Before the groups of processes are made, for which the first would wait without an end."""

    def without_configuration(self: group.Group, config: object, *others: object) -> None:
        self.messages.tell("build", None, *others)

    monkeypatch.setattr(group.Group, "begin", without_configuration)
    with pytest.raises(RankLostError, match=r"^rank 1: AttributeError: 'NoneType' object has no attribute 'seed'"):
        run_ranks(tmp_path, *TWO, *keys)


def test_gradients_that_the_plan_of_the_first_keeps_are_kept_on_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    keys = ("offload=layer_stream", "optimizer=host_adamw", "clip_norm=null", "steps=2", "eval.every=null")
    run_here(tmp_path / "one", *RUN, *keys, "microbatches=2")
    assert components_of(*RUN, *keys, *TWO).gradients.released
    monkeypatch.setattr(plan, "with_gradients_chosen", lambda components, made: made(components.with_gradients(KEPT)))
    run_ranks(tmp_path / "two", *TWO, *keys)
    last = "checkpoints/step-00000002"
    assert content(tmp_path / "two" / last) == content(tmp_path / "one" / last)


@pytest.mark.slow
def test_ranks_that_differ_save_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    compute = loop.forward_backward

    def and_changes(*arguments):
        weight = next(arguments[1].model.parameters())
        with torch.no_grad():
            weight[3] += 1
        return compute(*arguments)

    monkeypatch.setattr(loop, "forward_backward", and_changes)
    with pytest.raises(UserError, match=r"^\S+weight differs between rank 0 and rank 1"):
        run_ranks(tmp_path, *TWO)
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.slow
def test_torchrun_starts_the_same_run(tmp_path: Path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone", "train.py"]
    keys = [*RUN, "microbatches=1", "steps=2", f"hydra.run.dir={tmp_path / 'two'}"]
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([*command, *keys], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    run_here(tmp_path / "one", *RUN, "microbatches=2", "steps=2")
    last = "checkpoints/step-00000002"
    assert content(tmp_path / "two" / last) == content(tmp_path / "one" / last)
