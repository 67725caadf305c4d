"""A disk that fills while a checkpoint is saved, at every size from one block too few: a warning, and the run goes on.

The disk is a tmpfs, which only root may mount.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.faults.outcome import Outcome
from tests.faults.runs import RESIDENT, Ended, Whole, modes_and_optimizers, run
from training.checkpoints.saving import Checkpoints
from training.runs.checkpoint_files import checkpoints_in, folder_of, step_of
from training.runs.files import CHECKPOINTS_FOLDER

STEPS = 4
"""The run begins after the first. Its second and third find the disk full; before the last, there is room again."""
DISK = "4m"
LARGEST = 64
"""blocks that the disk is too small by, at most"""
REFUSED = "could not be saved (No space left on device): the run continues"


def survey(work: Path, outcome: Outcome, seed: int) -> None:
    """Runs on a disk that just suffices for the second checkpoint, and on disks that are too small by 1 block to 64."""
    whole, choices = Whole.of(work / "whole", STEPS), modes_and_optimizers(seed)
    begun = work / "begun"
    if problem := run(begun, RESIDENT, 1).problem():
        raise RuntimeError(problem)
    # The run's directory is the disk, so that its output goes elsewhere.
    run_dir = work / "run"
    with _mounted(run_dir) as refusal:
        if refusal:
            outcome.skipped = refusal
            return
        block = os.statvfs(run_dir).f_frsize
        needed = _blocks_of(folder_of(begun, 1), run_dir)
        outcome.planned = min(outcome.planned, LARGEST + 1)
        for number in outcome.in_time(range(outcome.planned)):
            missing = LARGEST * number // max(outcome.planned - 1, 1)
            shutil.copytree(begun, run_dir, dirs_exist_ok=True)
            before = _filling(run_dir, (needed - missing) * block)
            ended = run(run_dir, next(choices), STEPS, before=before)
            problem = ended.problem() or whole.problem(run_dir, STEPS) or _kept(run_dir, ended, missing)
            kind = "too small" if missing else "just large enough"
            outcome.add(kind, f"{missing} blocks of {needed} short", problem)
            _empty(run_dir)


@contextmanager
def _mounted(disk: Path) -> Iterator[str | None]:
    """Mounts a small disk; gives the reason if that is not possible."""
    disk.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", str(disk)]
    mounted = subprocess.run(command, capture_output=True, text=True)
    if mounted.returncode != 0:
        yield f"no disk of its own: {mounted.stderr.strip()}"
        return
    try:
        yield None
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def _free(disk: Path) -> int:
    return os.statvfs(disk).f_bfree


def _blocks_of(checkpoint: Path, disk: Path) -> int:
    """Returns how many blocks of the disk a checkpoint takes."""
    before = _free(disk)
    shutil.copytree(checkpoint, disk / "measured")
    blocks = before - _free(disk)
    shutil.rmtree(disk / "measured")
    return blocks


def _filling(disk: Path, nbytes: int) -> Callable[[], None]:
    """Returns what makes a run fill the disk but for `nbytes` before its first save, and free it before its last."""

    def install() -> None:
        save, filling = Checkpoints.save, disk / "filling"

        def saved(self, state, required=False):
            if state.step == 2:
                filling.write_bytes(bytes(max(_free(disk) * os.statvfs(disk).f_frsize - nbytes, 0)))
            elif state.step == STEPS:
                filling.unlink()
            return save(self, state, required)

        Checkpoints.save = saved

    return install


def _kept(run_dir: Path, ended: Ended, missing: int) -> str | None:
    """Returns what is wrong with the warnings of a run and with the checkpoints that it kept."""
    kept = [step_of(folder) for folder in checkpoints_in(run_dir / CHECKPOINTS_FOLDER)]
    refused, older = ([3], 2) if missing == 0 else ([2, 3], 1)
    if kept != [STEPS, older]:
        return f"the checkpoints of steps {kept} are left"
    warnings = [line for line in ended.output.splitlines() if REFUSED in line]
    if [f"step-{step:08d}" in line for step, line in zip(refused, warnings, strict=False)] != [True] * len(refused):
        return f"its warnings are {warnings}"
    return "a traceback" if "Traceback" in ended.output else None
