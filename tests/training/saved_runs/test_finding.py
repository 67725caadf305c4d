"""The run and the checkpoint that a path names."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.helpers.in_process import TINY_RUN, composed, run_here
from training.errors import UserError
from training.runs.directory import RunDirectory
from training.saved_runs.finding import configuration, found, newest_checkpoint, refuse_damage


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    run_here(folder, *TINY_RUN, "steps=2", "checkpoint.every=1")
    RunDirectory(folder).write_config(*composed(*TINY_RUN, "seed=5", run_dir=folder))
    return folder


def test_a_path_names_a_run_or_one_of_its_checkpoints(run: Path, monkeypatch: pytest.MonkeyPatch):
    first = run / "checkpoints" / "step-00000001"
    assert found(str(run)) == (run, None)
    assert found(str(first)) == (run, first)
    monkeypatch.chdir(run.parent)
    assert found(run.name) == (run, None)
    assert newest_checkpoint(run).name == "step-00000002"


def test_the_configuration_is_that_of_the_run_but_for_what_is_given(run: Path):
    config, invocation = configuration(run, ["batch_size=2"])
    assert (config.seed, config.batch_size, config.steps) == (5, 2, 6)
    assert invocation.run_dir == run


def test_what_is_not_there_or_damaged_is_refused(run: Path, tmp_path: Path):
    with pytest.raises(UserError, match=r"none: no such directory: give the directory of a run"):
        found(str(tmp_path / "none"))
    with pytest.raises(UserError, match=r"the run has no checkpoint: train with checkpoint\.every=N"):
        newest_checkpoint(tmp_path)
    config, _ = configuration(run, [])
    refuse_damage(newest_checkpoint(run), config)
    (run / "checkpoints" / "step-00000001" / "model.safetensors").write_bytes(b"")
    with pytest.raises(UserError, match=r"model\.safetensors has 0 bytes .*: give another checkpoint"):
        refuse_damage(run / "checkpoints" / "step-00000001", config)
