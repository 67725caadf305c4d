"""Mapped files: views, reads, changes of the file, and writes to the mapping."""

import errno
import mmap
import os
from pathlib import Path

import pytest

from offload.files.mapped_files import ChangedFileError, FileSpan, MappedFile, lies_in_file
from tests.offload.helpers.mapped import reads_through
from tests.offload.helpers.pages import open_files


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "weights.safetensors"
    file.write_bytes(bytes(range(256)) * 80)
    return file


def test_a_view_has_the_bytes_of_its_span_and_a_storage_of_its_own(path: Path):
    file = MappedFile(path)
    view = file.view(FileSpan(path, 300, 7))
    assert view.untyped_storage().nbytes() == 7
    assert lies_in_file(view)
    assert not lies_in_file(view.clone())
    del file
    # The mapping lives on with the view alone.
    assert view.tolist() == list(range(44, 51))
    assert MappedFile(path).view(FileSpan(path, 0, 0)).numel() == 0


def test_writes_to_a_view_stay_private(path: Path):
    file = MappedFile(path)
    file.view(FileSpan(path, 0, 100))[5] = 0
    assert path.read_bytes() == bytes(range(256)) * 80
    file.check()


def test_a_file_larger_than_all_memory_is_mapped(tmp_path: Path):
    large = tmp_path / "large"
    nbytes = 8 * os.sysconf("SC_PHYS_PAGES") * mmap.PAGESIZE
    with large.open("wb") as file:
        # It has no blocks on the disk.
        file.truncate(nbytes)
    assert MappedFile(large).view(FileSpan(large, nbytes - 8, 8)).tolist() == [0] * 8


@pytest.mark.parametrize("direct", [False, True])
def test_reads_bring_the_bytes_of_the_file(path: Path, direct: bool):
    file, memory = MappedFile(path), bytearray(8192)
    target = memoryview(memory)
    if direct:
        target = memoryview(mmap.mmap(-1, 8192))
    assert file.read(target, 4096, direct) == 8192
    assert bytes(target) == path.read_bytes()[4096 : 4096 + 8192]
    # At an odd place, and at the end.
    assert file.read(target[:100], 20400, direct) == 80


def test_a_file_system_without_direct_reads_is_read_through_its_cache(path: Path):
    file, refused = MappedFile(path), []

    def read(system, fd, buffers, offset):
        if fd == file.__dict__.get("_direct"):
            refused.append(offset)
            raise OSError(errno.EINVAL, "refused")
        return system(fd, buffers, offset)

    memory = bytearray(4096)
    with reads_through(read):
        assert file.read(memoryview(memory), 0, direct=True) == 4096
    assert refused == [0]
    assert bytes(memory) == path.read_bytes()[:4096]


def test_a_file_that_cannot_be_opened_past_the_cache_is_opened_once(path: Path, monkeypatch: pytest.MonkeyPatch):
    file, opened = MappedFile(path), os.open
    monkeypatch.setattr(os, "O_DIRECT", 0o40000000 | os.O_DIRECTORY)
    memory = bytearray(4096)
    assert file.read(memoryview(memory), 4096, direct=True) == 4096
    assert os.open is opened


def test_a_disk_error_names_the_file_and_the_place(path: Path):
    def read(system, fd, buffers, offset):
        raise OSError(errno.EIO, "Input/output error")

    with reads_through(read), pytest.raises(OSError, match="cannot be read at byte 4096") as error:
        MappedFile(path).read(memoryview(bytearray(10)), 4096)
    assert error.value.filename == str(path)


@pytest.mark.parametrize(
    ("change", "how"),
    [
        (lambda path: path.write_bytes(bytes(20480)), "was written or replaced"),
        (lambda path: os.truncate(path, 100), "had 20480 bytes and has 100 now"),
        (lambda path: path.unlink(), "was removed"),
        (lambda path: (path.unlink(), path.write_bytes(bytes(range(256)) * 80)), "was written or replaced"),
    ],
)
def test_a_file_that_changes_is_an_error_that_names_it(path: Path, change, how: str):
    file = MappedFile(path)
    file.check()
    os.utime(path, ns=(0, 0))
    file = MappedFile(path)
    change(path)
    with pytest.raises(ChangedFileError, match=how) as error:
        file.check()
    assert error.value.filename == str(path)


def test_a_file_shorter_than_its_header_says_and_an_empty_one_are_refused(path: Path, tmp_path: Path):
    with pytest.raises(ChangedFileError, match="has 20480 bytes and not the 30000"):
        MappedFile(path).view(FileSpan(path, 10000, 20000))
    empty = tmp_path / "empty"
    empty.touch()
    with pytest.raises(OSError, match="is empty"):
        MappedFile(empty)


def test_files_are_closed_with_their_last_reference(path: Path):
    before = open_files()
    file = MappedFile(path)
    file.read(memoryview(bytearray(4096)), 0, direct=True)
    assert open_files() - before
    del file
    assert not open_files() - before


def test_a_file_of_a_relative_path_is_found_from_another_directory(path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(path.parent)
    file = MappedFile(Path(path.name))
    (path.parent / "inside").mkdir()
    monkeypatch.chdir(path.parent / "inside")
    Path(path.name).write_bytes(b"another file")
    file.check()
    assert file._direct is None or os.fstat(file._direct).st_ino == path.stat().st_ino
