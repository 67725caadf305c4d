"""The names of checkpoints, and what stands beside them."""

import hashlib
import json
import threading
from pathlib import Path

import pytest

from training.runs.bounded_files import DamagedError
from training.runs.checkpoint_files import (
    MANIFEST_FILE,
    FileRecord,
    checkpoints_in,
    folder_of,
    free_aside,
    manifest_text,
    partials_in,
    read_manifest,
    side_by_side,
    step_of,
    verify,
)


@pytest.mark.parametrize("step", [0, 7, 12_345_678, 10**12])
def test_a_folder_has_its_step_in_its_name(tmp_path: Path, step: int):
    assert step_of(folder_of(tmp_path, step)) == step


@pytest.mark.parametrize(
    "name", ["step-7", "step-0000000x", "step-00000007.partial", "step-00000007.aside", "xstep-00000007", "manifest"]
)
def test_other_names_have_no_step(name: str):
    assert step_of(Path(name)) is None


def test_the_newest_come_first_and_nothing_but_folders(tmp_path: Path):
    for step in (3, 200_000_000, 20, 100):
        folder_of(tmp_path, step).mkdir(parents=True)
    home = folder_of(tmp_path, 0).parent
    (home / "step-00000500").write_text("a file")
    (home / "step-00000600.partial").mkdir()
    assert [step_of(folder) for folder in checkpoints_in(home)] == [200_000_000, 100, 20, 3]
    assert [path.name for path in partials_in(home)] == ["step-00000600.partial"]
    assert checkpoints_in(tmp_path / "nowhere") == []


def test_a_folder_is_set_aside_under_a_free_name(tmp_path: Path):
    folder = folder_of(tmp_path, 3)
    folder.parent.mkdir()
    found = []
    for _ in range(3):
        folder.mkdir()
        found.append(folder.rename(free_aside(folder)).name)
    assert found == ["step-00000003.aside", "step-00000003.aside-2", "step-00000003.aside-3"]
    folder.with_name("step-00000003.aside-4").symlink_to("nowhere")
    assert free_aside(folder).name == "step-00000003.aside-5"


def record_of(content: bytes) -> FileRecord:
    return FileRecord(len(content), hashlib.sha256(content).hexdigest())


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of two files with their manifest."""
    contents = {"a.bin": b"abc" * 1000, "b.json": b"{}"}
    for name, content in contents.items():
        (tmp_path / name).write_bytes(content)
    records = {name: record_of(content) for name, content in contents.items()}
    (tmp_path / MANIFEST_FILE).write_text(manifest_text(records))
    return tmp_path


def test_what_was_written_is_read_back_and_verified(folder: Path):
    files = read_manifest(folder)
    assert files == {"a.bin": record_of(b"abc" * 1000), "b.json": record_of(b"{}")}
    verify(folder, files)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "a.bin: no such file"),
        (b"abc" * 999, "a.bin has 2997 bytes where 3000 were written"),
        (b"abd" * 1000, "a.bin is not what was written: its SHA-256 differs"),
    ],
)
def test_a_file_that_changed_is_named(folder: Path, content: bytes | None, reason: str):
    files = read_manifest(folder)
    (folder / "a.bin").unlink()
    if content is not None:
        (folder / "a.bin").write_bytes(content)
    with pytest.raises(DamagedError, match=reason):
        verify(folder, files)


@pytest.mark.parametrize(
    "change", [lambda text: text + " ", lambda text: text.replace("\n", ""), lambda text: "\n" + text]
)
def test_a_manifest_of_another_form_is_refused(folder: Path, change):
    manifest = folder / MANIFEST_FILE
    manifest.write_text(change(manifest.read_text()))
    with pytest.raises(DamagedError, match=r"manifest\.json is not what was written"):
        read_manifest(folder)


def test_files_beyond_the_manifest_are_nobodys(folder: Path):
    (folder / "more.bin").write_bytes(b"x")
    verify(folder, read_manifest(folder))


@pytest.mark.parametrize("name", ["../a", "/etc/passwd", ".hidden", "", "a b", MANIFEST_FILE])
def test_a_name_that_leads_elsewhere_is_refused(folder: Path, name: str):
    (folder / MANIFEST_FILE).write_text(json.dumps({"format": 2, "files": {name: {"nbytes": 1, "sha256": ""}}}))
    with pytest.raises(DamagedError, match="which is not a file of a checkpoint"):
        read_manifest(folder)


def test_results_of_functions_side_by_side_are_in_their_order():
    together = threading.Barrier(3, timeout=300)
    assert side_by_side([lambda number=number: (together.wait(), number)[1] for number in range(3)]) == [0, 1, 2]


def test_the_first_error_ends_the_others_and_is_raised():
    given_up, begun = threading.Event(), []

    def wait_to_give_up() -> None:
        begun.append(None)
        given_up.wait(600)
        raise InterruptedError

    def fail() -> None:
        raise IndexError("the cause")

    with pytest.raises(IndexError, match="the cause"):
        side_by_side([fail, *[wait_to_give_up] * 20], given_up)
    assert len(begun) < 20
