"""What directories say of their runs: finished, failed, killed, running, damaged."""

from __future__ import annotations

import errno
import json
from pathlib import Path

import pytest

from training.comparison.report import compare
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
    assert [run.config["seed"] for run in runs] == list(range(12))


def test_the_sources_of_a_configuration_are_no_run(tmp_path: Path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf" / "config.yaml").write_text("defaults:\n  - model: tiny\nseed: 0\n")
    with pytest.raises(UserError, match="no run in here"):
        find_runs([tmp_path])


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


def test_a_directory_that_does_not_exist_is_named(tmp_path: Path):
    with pytest.raises(UserError, match="nothing: no such directory"):
        find_runs([tmp_path / "nothing"])


@pytest.mark.parametrize(
    ("status", "reason", "word"),
    [("ok", None, "ok"), ("out_of_memory", "the GPU is full", "out of memory"), ("failed", "lr=-1", "failed")],
)
def test_the_summary_says_how_a_run_ended(write_run, status: str, reason: str | None, word: str):
    run = read_run(write_run(status=status, reason=reason))
    assert (run.status, run.reason) == (word, reason or "")


@pytest.mark.parametrize(
    ("fits", "status"),
    [
        ({"vram_budget": True, "host_budget": None}, "planned"),
        ({"vram_budget": False, "host_budget": True}, "does not fit"),
    ],
)
def test_a_plan_says_whether_it_fits(write_run, fits: dict, status: str):
    run = read_run(write_run(status="planned", losses=None, plan={"fits": fits}))
    assert (run.status, run.planned, run.finished, run.summary["perf/step_ms"]) == (status, True, True, 100.0)


def test_a_run_that_did_what_its_plan_had_no_room_for_is_no_plan(write_run):
    run = read_run(write_run(plan={"fits": {"vram_budget": False}}))
    assert (run.status, run.planned, run.fits) == ("ok", False, True)


def test_a_run_without_a_summary_was_killed_and_its_steps_count(write_run):
    run = read_run(write_run(status=None, losses=(4.0, 3.0, 2.0), step_ms=7.0))
    assert run.status == "killed"
    assert (run.summary["steps"], run.summary["perf/step_ms"], run.summary["train/final_loss"]) == (3, 7.0, 2.0)


def test_a_run_that_holds_its_directory_is_running(write_run):
    directory = write_run(status=None)
    with locked(directory):
        assert read_run(directory).status == "running"
    assert read_run(directory).status == "killed"


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
def test_a_damaged_file_is_the_outcome_not_an_error(write_run, file: str):
    directory = write_run()
    (directory / file).write_text("{broken\n{}\n")
    run = read_run(directory)
    assert run.status == "failed"
    assert file in run.reason


@pytest.mark.parametrize(
    "line",
    [
        '{"train/step": 13, "train/loss": null}',
        '{"train/step": 13, "train/loss": "x"}',
        '{"train/step": 13, "train/loss": true}',
        '{"train/step": "13", "train/loss": 2.0}',
        '{"train/step": null, "train/loss": 2.0}',
        '{"train/step": 13, "train/loss": 2.0, "perf/step_ms": -1.0}',
        '{"train/step": 13, "train/loss": null, "nonfinite": ["train/loss"]}',
        '{"train/step": 13, "train/loss": 2.0, "nonfinite": {"train/loss": []}}',
    ],
)
def test_a_record_that_no_run_writes_is_the_outcome_of_its_run(write_run, line: str):
    write_run("none")
    odd = write_run("layer_stream") / "metrics.jsonl"
    odd.write_text(odd.read_text() + line + "\n")
    resident, failed = compare([write_run.folder], write_run.folder)
    assert (resident.status, failed.status) == ("ok", "failed")
    assert "metrics.jsonl: line 4 is not a record: " in failed.reasons[0]


@pytest.mark.parametrize(
    "summary",
    [
        '{"status": "ok", "perf/step_ms": null, "memory/rss_gib": 1.0, "nonfinite": {"perf/step_ms": "inf"}}',
        '{"status": "ok", "nonfinite": ["perf/step_ms"]}',
        '{"status": "planned", "planned/perf/step_ms": "fast"}',
        '{"status": "ok", "train/final_loss": 1' + "0" * 400 + "}",
    ],
)
def test_a_summary_that_no_run_writes_is_the_outcome_of_its_run(write_run, summary: str):
    write_run("none")
    (write_run("layer_stream") / "summary.json").write_text(summary)
    resident, failed = compare([write_run.folder], write_run.folder)
    assert (resident.status, failed.status) == ("ok", "failed")
    assert "summary.json: " in failed.reasons[0]


@pytest.mark.parametrize("file", ["summary.json", "metrics.jsonl"])
def test_a_folder_in_place_of_a_file_is_the_outcome_of_its_run(write_run, file: str):
    directory = write_run()
    (directory / file).unlink()
    (directory / file).mkdir()
    run = read_run(directory)
    assert run.status == "failed"
    assert f"{file}: it cannot be read (Is a directory)" in run.reason


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("config.yaml", "{offload: {_target_: a.b.Resident}, seed: [1, 2]}"),
        ("config.yaml", "{offload: {_target_: a.b.Resident}, seed: {a: 1}}"),
        ("config.yaml", "{offload: {_target_: null}, seed: 0}"),
        ("config.yaml", "{offload: {_target_: 3}, seed: 0}"),
        ("config.yaml", "{offload: {_target_: Resident}, day: 2001-99-99}"),
        ("choices.yaml", "choices: {1: none}"),
        ("hardware.json", '{"gpu_name": ["x"], "device": 3, "h2d_gb_s": "fast"}'),
        ("plan.json", '{"floors_ms": {"host optimizer": "long"}, "fits": [true]}'),
    ],
)
def test_an_odd_description_leaves_the_figures(write_run, file: str, text: str):
    write_run("none")
    directory = write_run("layer_stream", transfer__h2d_gib=1.0)
    (directory / file).write_text(text)
    assert [row.mean("perf/step_ms") for row in compare([write_run.folder], write_run.folder)] == [100.0, 100.0]


def test_what_cannot_be_read_is_named(write_run, monkeypatch: pytest.MonkeyPatch):
    def refuse(self: Path):
        raise PermissionError(errno.EACCES, "Permission denied", str(self))

    write_run()
    monkeypatch.setattr(Path, "iterdir", refuse)
    with pytest.raises(UserError, match=r"runs: it cannot be read \(Permission denied\)"):
        find_runs([write_run.folder])


@pytest.mark.parametrize("file", ["config.yaml", "hardware.json", "choices.yaml"])
def test_a_damaged_description_leaves_the_figures(write_run, file: str):
    directory = write_run(hardware={"gpu_name": "H200"})
    (directory / file).write_bytes(b"\xff\x00: [")
    assert read_run(directory).summary["perf/step_ms"] == 100.0


def test_infinite_losses_are_read_back(write_run):
    directory = write_run(losses=None)
    record = {"train/step": 1, "train/loss": None, "nonfinite": {"train/loss": "inf"}}
    (directory / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert read_run(directory).records == [{"train/step": 1, "train/loss": float("inf")}]
