"""checkpoint.best: the best checkpoint is saved, kept and linked to, however the run goes on."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from training.checkpoints.best import Best
from training.errors import UserError
from training.evaluation.held_out import Evaluation
from training.run.recorder import Recorder
from training.runs.checkpoint_files import folder_of
from training.runs.records import read_summary
from training.saved_runs.finding import found, newest_checkpoint

SPLIT = "dataset.eval_share=0.05"
EVALUATES = ("checkpoint.best=eval/loss", "eval.every=1", "eval.batches=1", "checkpoint.keep=1", SPLIT)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, run_here) -> Callable[..., dict]:
    """Runs with `losses` as those of the evaluations, the first before the first step that the run makes."""

    def scored(folder: Path, losses: list[float], *overrides: str) -> dict:
        left = list(losses)
        monkeypatch.setattr(Evaluation, "metrics", lambda *_: {"eval/loss": left.pop(0), "eval/ms": 1.0})
        return run_here(folder, *EVALUATES, "checkpoint.every=null", *overrides)

    return scored


def saved(folder: Path) -> dict[str, str | None]:
    """Returns what is in the folder of checkpoints, with the target of each link."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else None
        for path in sorted((folder / "checkpoints").iterdir())
    }


def test_the_best_is_kept_beside_the_newest(tmp_path: Path, scored, monkeypatch: pytest.MonkeyPatch):
    steps, save = [], Recorder.save
    monkeypatch.setattr(
        Recorder, "save", lambda self, step, *given, **keys: steps.append(step) or save(self, step, *given, **keys)
    )
    # The smallest, before the first step, is no checkpoint's; what is no number, or as good as another, is not better.
    losses = [0.5, 3.0, 2.0, float("nan"), 2.0, 2.5, 4.0]
    done = scored(tmp_path, losses, "checkpoint.every=4")
    # Step 4 is due, and 6 is the last.
    assert steps == [1, 2, 4, 6]
    assert saved(tmp_path) == {"best": "step-00000002", "step-00000002": None, "step-00000006": None}
    assert done["checkpoint/best_step"] == read_summary(tmp_path)["checkpoint/best_step"] == 2
    assert newest_checkpoint(tmp_path).name == "step-00000006"
    assert found(str(tmp_path / "checkpoints" / "best")) == (tmp_path, tmp_path / "checkpoints" / "step-00000002")


def test_a_resumed_run_knows_the_best(tmp_path: Path, scored, at):
    scored(tmp_path, [9.0, 3.0, 2.0, 5.0, 6.0], "steps=4", "checkpoint.every=4")
    assert saved(tmp_path) == {"best": "step-00000002", "step-00000002": None, "step-00000004": None}
    scored(tmp_path, [2.5, 1.0], "resume=auto", "checkpoint.every=2")
    assert saved(tmp_path) == {"best": "step-00000006", "step-00000006": None}
    # From the one before the best: that is set aside, and the link does not lead to nothing.
    other = tmp_path / "other"
    scored(other, [9.0, 3.0, 4.0, 2.0, 6.0], "steps=4", "checkpoint.every=1", "checkpoint.keep=9")
    assert saved(other)["best"] == "step-00000003"
    scored(other, [5.0], "steps=3", f"resume={at(other, 2)}")
    assert saved(other)["best"] == "step-00000001"
    # Where no best one is asked for, none is kept.
    scored(other, [5.0, 5.0], "steps=4", "resume=auto", "checkpoint.best=null", "checkpoint.every=4")
    assert saved(other).keys() == {"step-00000003.aside", "step-00000004.aside", "step-00000004"}


def test_the_best_can_be_resumed_from(tmp_path: Path, scored):
    scored(tmp_path, [9.0, 3.0, 2.0, 5.0, 6.0], "steps=4", "checkpoint.every=4")
    scored(tmp_path, [4.0, 1.5], "steps=4", f"resume={tmp_path}/checkpoints/best")
    assert saved(tmp_path)["best"] == "step-00000004"
    elsewhere = tmp_path / "elsewhere"
    scored(elsewhere, [7.0, 8.0, 9.0], "steps=6", f"resume={tmp_path}/checkpoints/best")
    # Better ones in another directory are not this run's.
    assert saved(elsewhere) == {"best": "step-00000005", "step-00000005": None}


def test_a_larger_accuracy_is_better(tmp_path: Path):
    records = [{"train/step": step, "eval/accuracy": 0.1 * step, "eval/loss": 0.1 * step} for step in (1, 2)]
    for metric, step in (("eval/accuracy", 2), ("eval/loss", 1)):
        best = Best(metric, tmp_path / metric)
        for record in records:
            best.add(record)
            if best.wants(record["train/step"]):
                folder_of(tmp_path / metric, record["train/step"]).mkdir(parents=True)
                best.saved(record["train/step"])
        assert best.step == step


def test_a_checkpoint_that_the_disk_refuses_is_not_the_best(tmp_path: Path):
    best = Best("eval/loss", tmp_path)
    best.add({"train/step": 1, "eval/loss": 1.0})
    assert best.wants(1)
    best.add({"train/step": 2, "eval/loss": 2.0})
    assert (best.wants(1), best.wants(2)) == (False, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("eval.every=null",), r"checkpoint\.best=eval/loss: the run does not evaluate: give eval\.every=N, or check"),
        (("checkpoint.best=loss",), r"checkpoint\.best=loss: the run measures eval/loss: choose one, or null$"),
        (("checkpoint.best=eval/accuracy",), r"checkpoint\.best=eval/accuracy: the run measures eval/loss: choose"),
    ],
)
def test_what_a_run_does_not_measure_is_refused(tmp_path: Path, run_here, keys: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=f"^{message}"):
        run_here(tmp_path, *EVALUATES, *keys)
