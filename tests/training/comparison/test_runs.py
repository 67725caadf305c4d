"""Reading run directories: finished, failed, killed, running and damaged runs."""

from pathlib import Path

import pytest

from training.comparison.runs import find_runs, read_run
from training.errors import UserError
from training.runs.directory import locked


def test_runs_are_found_at_any_depth_once_and_in_the_order_of_their_numbers(write_run, tmp_path: Path):
    for seed in range(12):
        write_run(seed=seed)
    (write_run.folder / "0" / "wandb" / "files").mkdir(parents=True)
    (write_run.folder / "0" / "wandb" / "files" / "config.yaml").write_text("a: 1\n")
    (tmp_path / "empty").mkdir()
    runs = find_runs([tmp_path, write_run.folder / "3"])
    assert [run.config["seed"] for run in runs] == list(map(str, range(12)))


@pytest.mark.parametrize("lock", [True, False])
def test_a_configuration_alone_is_no_run_unless_it_was_locked(tmp_path: Path, lock: bool):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "config.yaml").write_text("a: 1\n")
    if not lock:
        with pytest.raises(UserError, match="no run in here"):
            find_runs([tmp_path])
        return
    (tmp_path / "data" / ".lock").touch()
    (run,) = find_runs([tmp_path])
    assert run.status == "killed"


@pytest.mark.parametrize(
    ("status", "reason", "word"),
    [("ok", None, "ok"), ("out_of_memory", "the GPU is full", "out of memory"), ("failed", "lr=-1", "failed")],
)
def test_the_summary_has_the_status_and_the_reason(write_run, status: str, reason: str | None, word: str):
    run = read_run(write_run(status=status, reason=reason))
    assert (run.status, run.reason) == (word, reason or "")


@pytest.mark.parametrize(
    ("fits", "status"),
    [
        ({"vram_budget": True, "host_budget": None}, "planned"),
        ({"vram_budget": False, "host_budget": True}, "does not fit"),
    ],
)
def test_a_plan_that_misses_a_budget_does_not_fit(write_run, fits: dict, status: str):
    run = read_run(write_run(status="planned", losses=None, plan={"fits": fits}))
    assert (run.status, run.planned, run.finished, run.summary["perf/step_ms"]) == (status, True, True, 100.0)


def test_a_run_that_finished_fits_whatever_its_plan_said(write_run):
    run = read_run(write_run(plan={"fits": {"vram_budget": False}}))
    assert (run.status, run.planned, run.misfits) == ("ok", False, ())


def test_a_run_without_a_summary_was_killed_and_its_steps_make_its_metrics(write_run):
    run = read_run(write_run(status=None, losses=(4.0, 3.0, 2.0), step_ms=7.0))
    assert run.status == "killed"
    assert (run.summary["steps"], run.summary["perf/step_ms"], run.summary["train/final_loss"]) == (3, 7.0, 2.0)


def test_a_run_that_holds_its_directory_is_running(write_run):
    directory = write_run(status=None)
    with locked(directory):
        assert read_run(directory).status == "running"
    assert read_run(directory).status == "killed"
