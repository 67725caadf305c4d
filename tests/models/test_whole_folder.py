"""A folder is complete or not there."""

import errno
import os
import stat
from pathlib import Path

import pytest

from models import whole_folder
from models.whole_folder import bytes_of, write_whole_folder


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("is_there", [True, False])
def test_files_are_written_to_a_new_or_an_empty_folder(tmp_path: Path, is_there: bool, monkeypatch):
    folder = tmp_path / "deep" / "out"
    if is_there:
        folder.mkdir(parents=True)
    write_whole_folder(folder, {"a": bytes_of(b"1"), "b": lambda write: [write(b"2"), write(memoryview(b"3"))]})
    assert [(folder / name).read_bytes() for name in "ab"] == [b"1", b"23"]
    assert names(folder.parent) == ["out"]
    monkeypatch.chdir(folder.parent)
    write_whole_folder(Path("other"), {"c": bytes_of(b"")})
    assert names(Path()) == ["other", "out"]


def test_the_names_of_new_folders_above_are_flushed_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    flushed = []
    monkeypatch.setattr(whole_folder, "flush_names", flushed.append)
    write_whole_folder(tmp_path / "new" / "deep" / "one", {"a": bytes_of(b"1")})
    assert flushed[1:] == [tmp_path / "new" / "deep", tmp_path / "new", tmp_path]
    flushed.clear()
    write_whole_folder(tmp_path / "new" / "deep" / "two", {"a": bytes_of(b"1")})
    assert flushed[1:] == [tmp_path / "new" / "deep"]


@pytest.mark.parametrize(
    ("code", "is_written"), [("EINVAL", True), ("ENOTSUP", True), ("EBADF", True), ("EIO", False), ("ENOSPC", False)]
)
@pytest.mark.parametrize("is_folder", [True, False])
def test_a_file_system_may_refuse_to_flush_folders_but_not_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, is_written: bool, is_folder: bool
):
    def refuses(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode) == is_folder:
            raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(os, "fsync", refuses)
    if is_written and is_folder:
        write_whole_folder(tmp_path / "out", {"a": bytes_of(b"1")})
        assert (tmp_path / "out" / "a").read_bytes() == b"1"
    else:
        with pytest.raises(OSError, match=os.strerror(getattr(errno, code))):
            write_whole_folder(tmp_path / "out", {"a": bytes_of(b"1")})
        assert names(tmp_path) == []


@pytest.mark.parametrize("error", [OSError("full"), KeyboardInterrupt(), ValueError("strange")])
def test_an_error_leaves_nothing(tmp_path: Path, error: BaseException):
    seen = []

    def fails(write) -> None:
        seen.extend(names(tmp_path))
        raise error

    with pytest.raises(type(error)):
        write_whole_folder(tmp_path / "out", {"a": bytes_of(b"1"), "b": fails})
    assert seen == ["out.partial"]
    assert names(tmp_path) == []


def test_what_is_there_is_refused_and_stays(tmp_path: Path):
    full, file, link, half = (tmp_path / name for name in ("full", "file", "link", "half"))
    full.mkdir()
    (full / "mine").touch()
    file.touch()
    link.symlink_to(tmp_path / "elsewhere")
    half.with_name("half.partial").mkdir()
    before = names(tmp_path)
    for folder, problem in (
        (full, "full is not empty: give a new folder"),
        (file, "file is not a folder: give a new one"),
        (link, "link is not a folder: give a new one"),
        (half, r"half\.partial is there: another program writes it now, or was killed: then remove it"),
    ):
        with pytest.raises(ValueError, match=problem):
            write_whole_folder(folder, {"a": bytes_of(b"1")})
    assert names(tmp_path) == before
