"""scripts/show.py: chats with what is trained on marked, of arguments and of a run, and its mistakes in one line."""

import json
import sys
from pathlib import Path

import pytest

from scripts import show
from tests.scripts.conftest import called
from tests.training.helpers.in_process import composed
from training.runs.directory import RunDirectory


@pytest.fixture
def files(tmp_path: Path) -> str:
    rows = [{"prompt": f"What is {n}?", "completion": f"It is {n}. \x1b[2J"} for n in range(5)]
    (tmp_path / "chats.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return str(tmp_path / "chats.jsonl")


def test_chats_are_shown_with_what_is_trained_on(files: str, monkeypatch, capsys) -> None:
    assert called(monkeypatch, show, "dataset=chat", f"dataset.files={files}", "--count", "2") == 0

    shown, _, facts = capsys.readouterr().out.rpartition("---\n")
    assert shown == "".join(
        f"--- {files} line {n + 1}\n"
        f"user\nWhat is {n}?<|endoftext|>assistant\n\u27e6It is {n}. \\x1b[2J<|endoftext|>\u27e7\n"
        for n in range(2)
    )
    assert facts.startswith("chats to train on  5; 0 to evaluate on\n")


def test_in_a_terminal_it_is_green(files: str, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)

    assert called(monkeypatch, show, "dataset=chat", f"dataset.files={files}", "--count=1") == 0

    assert "\033[32mIt is 0. \\x1b[2J<|endoftext|>\033[0m\n" in capsys.readouterr().out


def test_a_run_is_shown_with_changes(files: str, tmp_path: Path, monkeypatch, capsys) -> None:
    run = tmp_path / "run"
    run.mkdir()
    RunDirectory(run).write_config(*composed("dataset=chat", f"dataset.files={files}", run_dir=run))

    assert called(monkeypatch, show, run, "dataset.train_on=all", "--count=1") == 0

    assert "\u27e6user\nWhat is 0?" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("dataset=stdlib",), "StdlibText has no chats to show: take dataset=chat or preferences"),
        (("dataset=chat",), "dataset.files=null dataset.name=null: give one of them"),
        (("nowhere",), "nowhere: no such directory: give the directory of a run"),
        (("dataset=chat", "--count=0"), "--count=0: must be at least 1"),
        (("dataset=chat", "dataset.files=a.jsonl", "dataset.train_on=user"), "dataset.train_on=user"),
    ],
)
def test_mistakes_are_told_in_one_line(arguments: tuple[str, ...], message: str, monkeypatch, capsys) -> None:
    assert called(monkeypatch, show, *arguments) != 0

    error = capsys.readouterr().err
    assert error.startswith(f"error: {message}")
    assert error.count("\n") == 1
