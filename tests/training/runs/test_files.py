"""The names of files: written in one place, and refused if they are links."""

from __future__ import annotations

import ast
import os
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.in_process import train_tiny
from tests.training.helpers.time_limit import time_limit
from training.errors import UserError
from training.runs import files
from training.runs.directory import locked
from training.runs.files import RUN_FILES


@pytest.mark.parametrize("name", RUN_FILES)
def test_a_link_is_refused(tmp_path: Path, name: str):
    (tmp_path / name).symlink_to("nowhere")
    with pytest.raises(UserError, match=f"{name} is a link to another file"), locked(tmp_path):
        pass


@pytest.mark.parametrize("name", [*RUN_FILES, "trace/step-3.png", "trace/partial-step-3.json.gz"])
@pytest.mark.parametrize("make", [os.mkfifo, os.mkdir], ids=["pipe", "folder"])
def test_what_is_not_a_file_is_refused(tmp_path: Path, name: str, make):
    (tmp_path / name).parent.mkdir(exist_ok=True)
    make(tmp_path / name)
    with time_limit(20), pytest.raises(UserError, match=f"{name} is not a file, and the run writes"), locked(tmp_path):
        pass


@pytest.mark.parametrize("name", [".lock", "train.log", "metrics.jsonl", "summary.json.partial"])
@pytest.mark.slow
def test_a_pipe_in_the_directory_of_a_run_is_one_line(tmp_path: Path, name: str):
    os.mkfifo(tmp_path / name)
    with time_limit(60):
        assert train_tiny(tmp_path, status=1).startswith(f"error: {tmp_path / name} is not a file, and the run writes")
    assert os.listdir(tmp_path) == [name]


def test_what_a_link_leads_to_is_left_alone(tmp_path: Path):
    target, folder = tmp_path / "mine.txt", tmp_path / "run"
    target.write_text("mine")
    folder.mkdir()
    (folder / "train.log").symlink_to(target)
    assert train_tiny(folder, "steps=-1", status=1).startswith(
        f"error: {folder / 'train.log'} is a link to another file"
    )
    assert target.read_text() == "mine"
    assert os.listdir(folder) == ["train.log"]


def test_names_are_written_in_one_file():
    """No other source file has a literal of a name in `training.runs.files`, nor of a comparison's files."""
    constants = [value for name, value in vars(files).items() if name.isupper() and isinstance(value, str)]
    # Folders have names that are words, and ".partial" ends names of other programs' files too.
    once = {value for value in constants if "." in value[1:]} | {*files.FIGURE_FILES}
    for path in (ROOT / "train.py", *(ROOT / "training").rglob("*.py"), *(ROOT / "scripts").glob("*.py")):
        if path == ROOT / "training" / "runs" / "files.py":
            continue
        tree = ast.parse(path.read_text())
        literals = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}
        assert not once & {text for text in literals if isinstance(text, str)}, path


def test_a_partial_file_stands_beside_its_own():
    assert files.partial_path(Path("run/summary.json")) == Path("run/summary.json.partial")
    assert files.partial_path(Path("run/step-00000003")) == Path("run/step-00000003.partial")
