"""Samples in wandb: rows of one table, each stored once, at the step whose metrics may follow."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from PIL import Image

from training.metrics.wandb_tracker import Tracker


def test_samples_are_rows_of_one_incremental_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    logged = []

    def log(values: dict, **where) -> None:
        logged.append((values["samples"], [list(row) for row in values["samples"].data], values["train/step"], where))

    monkeypatch.setattr(Tracker, "_submit", lambda self, task: task(SimpleNamespace(log=log)))
    tracker = Tracker("disabled", run_dir=tmp_path, config={})
    tracker.log_sample({"prompt": "a", "text": "ab\n"}, 0)
    tracker.log_sample({"prompt": "a", "text": "ac"}, 4)
    (table, first, *_), (again, both, step, where) = logged
    assert again is table
    assert (table.columns, table.log_mode) == (["step", "prompt", "text"], "INCREMENTAL")
    assert (first, both) == ([[0, "a", "ab\n"]], [[0, "a", "ab\n"], [4, "a", "ac"]])
    assert (step, where) == (4, {"step": 4, "commit": False})


def test_a_picture_is_passed_as_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    picture, logged = tmp_path / "step-000004.png", []
    Image.new("RGB", (4, 2)).save(picture)
    run = SimpleNamespace(log=lambda values, **where: logged.append(values["samples"]))
    monkeypatch.setattr(Tracker, "_submit", lambda self, task: task(run))
    Tracker("disabled", run_dir=tmp_path, config={}).log_sample({"caption": "letters", "picture": picture}, 4)
    ((step, caption, entry),) = logged[0].data
    assert (step, caption, entry.image.size) == (4, "letters", (4, 2))
