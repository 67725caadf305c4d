"""scripts/export.py: its arguments, and its mistakes in one line."""

from pathlib import Path

import pytest

from scripts import export as script
from tests.scripts.conftest import called
from training.saved_runs import export


def test_what_was_asked_is_exported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    asked = []
    monkeypatch.setattr(export, "export", lambda *given: asked.append(given) or ["config.json", "model.safetensors"])
    assert called(monkeypatch, script, "runs/a", "out", "dataset.tokenizer=t.json") == 0
    assert called(monkeypatch, script, "runs/a", "out", "--max-shard", "1MiB", "--merge") == 0
    assert asked == [
        ("runs/a", "out", ["dataset.tokenizer=t.json"], 4 * 2**30, False),
        ("runs/a", "out", [], 2**20, True),
    ]
    assert capsys.readouterr().out.splitlines() == ["out: config.json, model.safetensors"] * 2


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("none", "out"), "none: no such directory: give the directory of a run, or one of its checkpoints"),
        (("none", "out", "--max-shard", "many"), "--max-shard=many: must be bytes"),
    ],
)
def test_a_mistake_is_one_line(
    arguments: tuple[str, ...],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    assert called(monkeypatch, script, *arguments) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ")
    assert problem in line
    assert list(tmp_path.iterdir()) == []
