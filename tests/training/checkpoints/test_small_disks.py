"""Runs on a disk that is really full, or takes no larger file: the checkpoints and records before are whole."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from training.errors import UserError
from training.runs.checkpoint_files import checkpoints_in, step_of
from training.runs.manifest import read_manifest, verify
from training.runs.records import MetricsWriter, read_metrics


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 1 MiB: a checkpoint of the tiny model takes about 0.3."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if mounted.returncode != 0:
        pytest.skip(f"no disk of its own for this test: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def fill(folder: Path, leave: int) -> None:
    """Takes all of a disk but `leave` bytes."""
    disk = os.statvfs(folder)
    (folder / "filling").write_bytes(bytes(max(disk.f_bavail * disk.f_frsize - leave, 0)))


def write_all(writer: MetricsWriter, records: list[dict]) -> None:
    for record in records:
        writer.write(record)


def whole(run_dir: Path) -> list[int]:
    found = checkpoints_in(run_dir / "checkpoints")
    for folder in found:
        verify(folder, read_manifest(folder))
    return [step_of(folder) for folder in found]


@pytest.mark.slow
def test_checkpoints_on_a_full_disk(small_disk: Path, run_here, caplog: pytest.LogCaptureFixture, curve):
    """One that is refused is a warning, and no more than a warning; the last has to be there."""
    run_dir = small_disk / "run"
    run_here(run_dir, "steps=3")
    fill(small_disk, leave=2**17)
    with pytest.raises(
        UserError, match=r"step-00000006 could not be saved \(No space left on device\): free some space"
    ):
        run_here(run_dir, "checkpoint.every=1", "steps=6", "resume=auto")
    assert "step-00000004 could not be saved (No space left on device): the run continues" in caplog.text
    assert whole(run_dir) == [3]
    assert [path.name for path in (run_dir / "checkpoints").iterdir()] == ["step-00000003"]
    (small_disk / "filling").unlink()
    assert run_here(run_dir, "steps=6", "resume=auto")["status"] == "ok"
    assert whole(run_dir) == [6, 3]
    assert [record["train/step"] for record in curve(run_dir)] == [2, 3, 4, 6]


def test_records_on_a_full_disk(small_disk: Path):
    writer = MetricsWriter(small_disk)
    records = [{"train/step": step, "text": "x" * 1000} for step in range(1, 2000)]
    writer.write(records[0])
    fill(small_disk, leave=2**14)
    with pytest.raises(UserError, match="the disk of the run's directory is full; free some space"):
        write_all(writer, records[1:])
    written = read_metrics(small_disk)
    assert written == records[: len(written)]
    assert (small_disk / "metrics.jsonl").read_bytes().endswith(b"}\n")
    (small_disk / "filling").unlink()
    MetricsWriter(small_disk, after_step=len(written)).write(records[len(written)])
    assert read_metrics(small_disk) == records[: len(written) + 1]
