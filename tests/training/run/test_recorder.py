"""The records and the summary of a run."""

from pathlib import Path

import pytest

from tests.training.helpers.in_process import SMALL_RUN, run_here
from training.planning.report import RunPlan
from training.runs.records import read_metrics as metrics
from training.runs.records import read_summary as summary

# For runs in this process.
QUIET = (*SMALL_RUN, "tracking=disabled")


def test_the_summary_has_the_ratio_of_the_step_to_its_floor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(RunPlan, "summary", lambda plan: {"perf/floor_ms": 2.0})
    run_here(tmp_path, *QUIET)
    found = summary(tmp_path)
    assert (found["status"], found["steps"], found["reason"]) == ("ok", 6, None)
    assert found["perf/floor_ratio"] == found["perf/step_ms"] / 2.0


def test_a_resumed_run_keeps_its_records_and_its_count_of_skipped_steps(tmp_path: Path):
    job = (*QUIET, "log_every=1", "checkpoint.every=2", "on_nonfinite=skip", "optimizer.lr=1e30")
    run_here(tmp_path / "run", *job, "steps=4")
    run_here(tmp_path / "run", *job, "steps=6", "resume=auto")
    records = metrics(tmp_path / "run")
    assert [record["train/step"] for record in records] == [1, 2, 3, 4, 5, 6]
    assert [record["train/skipped_steps"] for record in records] == [0, 1, 2, 3, 4, 5]
    assert "checkpoint/save_ms" in records[2]


@pytest.mark.slow
def test_the_first_loss_is_that_of_the_first_step_also_where_it_is_not_logged(tmp_path: Path):
    run_here(tmp_path / "every", *QUIET, "steps=3", "log_every=1")
    expected = metrics(tmp_path / "every")[0]["train/loss"]
    # Saved before anything is logged, and killed then.
    job = (*QUIET, "steps=3", "log_every=3", "checkpoint.every=2")
    run_here(tmp_path / "run", *job)
    assert summary(tmp_path / "run")["train/first_loss"] == expected
    run_here(tmp_path / "run", *job, f"resume={tmp_path / 'run' / 'checkpoints' / 'step-00000002'}")
    assert summary(tmp_path / "run")["train/first_loss"] == expected
