"""Folders that are complete or not there."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.checkpoints.durable import remove_folder, write_folder
from training.runs.checkpoint_files import MANIFEST_FILE
from training.runs.manifest import read_manifest, verify


def writing(content: bytes):
    return lambda write: write(content)


def test_a_folder_has_its_files_and_a_manifest_of_them(tmp_path: Path):
    folder = tmp_path / "new" / "folder"
    nbytes = write_folder(folder, {"a": writing(b"abc"), "b": lambda write: [write(b"x") for _ in range(5)]})
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.name != MANIFEST_FILE} == {
        "a": b"abc",
        "b": b"xxxxx",
    }
    verify(folder, read_manifest(folder))
    assert nbytes == sum(path.stat().st_size for path in folder.iterdir())
    assert [path.name for path in folder.parent.iterdir()] == ["folder"]


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), KeyboardInterrupt(), RuntimeError("CUDA error")]
)
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException):
    def fail(write) -> None:
        write(b"half")
        raise error

    with pytest.raises(type(error)):
        write_folder(tmp_path / "folder", {"a": writing(b"abc"), "b": fail})
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_in_part_is_no_longer_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    folder = tmp_path / "folder"
    write_folder(folder, {"a": writing(b"abc")})
    monkeypatch.setattr("training.checkpoints.durable.shutil.rmtree", lambda path: (path / "a").unlink())
    remove_folder(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["folder.partial"]
