"""Files that are written whole: the old content or the new one, and nothing beside it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.training.helpers.time_limit import time_limit
from training.runs.whole_file import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_files_are_written_whole_or_not_at_all(tmp_path: Path, durable: bool):
    (tmp_path / "file").write_text("old")
    (tmp_path / "folder").mkdir()
    write_whole(tmp_path / "file", b"new", durable=durable)
    assert (tmp_path / "file").read_text() == "new"
    with pytest.raises(OSError, match="folder"):
        write_whole(tmp_path / "folder", b"new", durable=durable)
    assert {path.name for path in tmp_path.iterdir()} == {"file", "folder"}


def test_a_write_that_fails_leaves_the_old_file(tmp_path: Path):
    (tmp_path / "file").write_text("old")
    with pytest.raises(TypeError):
        write_whole(tmp_path / "file", "text, not bytes")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


@pytest.mark.parametrize("leftover", [os.mkfifo, lambda path: path.symlink_to("victim")], ids=["pipe", "link"])
def test_what_is_left_of_an_earlier_write_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, leftover):
    monkeypatch.chdir(tmp_path)
    Path("victim").write_text("mine")
    leftover(Path("file.partial"))
    with time_limit(20):
        write_whole(Path("file"), b"new")
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"victim": "mine", "file": "new"}
