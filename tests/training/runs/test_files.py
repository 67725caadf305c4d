"""The names of files, written in one place; files that are written whole; paths in a home directory."""

import ast
import os
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.time_limit import time_limit
from training.errors import UserError
from training.runs import files
from training.runs.files import home_expanded, write_whole


def test_names_are_written_in_one_file():
    """No other source file has a literal of a name in `training.runs.files`, nor of a comparison's files."""
    constants = [value for name, value in vars(files).items() if name.isupper() and isinstance(value, str)]
    # Folders have names that are words, and ".partial" ends names of other programs' files too.
    once = {value for value in constants if "." in value[1:]} | {*files.FIGURES}
    for path in (ROOT / "train.py", *(ROOT / "training").rglob("*.py"), *(ROOT / "scripts").glob("*.py")):
        if path == ROOT / "training" / "runs" / "files.py":
            continue
        tree = ast.parse(path.read_text())
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not once & {text for text in literals if isinstance(text, str)}, path


def test_a_home_is_replaced(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/somewhere")
    assert home_expanded("resume", "~/runs/a") == Path("/somewhere/runs/a")
    assert home_expanded("resume", "runs/~a") == Path("runs/~a")
    with pytest.raises(UserError, match=r"^resume=~nosuchuser/x: there is no home directory of that name: give "):
        home_expanded("resume", "~nosuchuser/x")


@pytest.mark.parametrize("durable", [False, True])
def test_files_are_written_whole_or_not_at_all(tmp_path: Path, durable: bool):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    write_whole(tmp_path / "file", b"new", durable=durable)
    assert (tmp_path / "file").read_text() == "new"
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"new", durable=durable)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


@pytest.mark.parametrize("leftover", [os.mkfifo, lambda path: path.symlink_to("victim")], ids=["pipe", "link"])
def test_what_is_left_of_an_earlier_write_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover):
    monkeypatch.chdir(tmp_path)
    Path("victim").write_text("mine")
    leftover(Path("file.partial"))
    with time_limit(20):
        write_whole(Path("file"), b"new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"victim": "mine", "file": "new"}
