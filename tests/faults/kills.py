"""Runs killed with SIGKILL at random moments, each under an offload mode and an optimizer of its own.

Half of the kills fall between the start and about the first checkpoint, half after it, where most of the time is spent
in saves. Several hit the same run, which is then resumed to its end.
"""

import os
import random
import signal
import time
from pathlib import Path

from tests.faults.outcome import Outcome
from tests.faults.runs import LIMIT_S, Whole, modes_and_optimizers, newest, run, start, wait
from training.runs.checkpoint_files import partials_in
from training.runs.files import CHECKPOINTS_FOLDER

STEPS = 24
KILLS_A_RUN = 8
AFTER_CHECKPOINT_S = 0.3


def survey(work: Path, outcome: Outcome, seed: int) -> None:
    """Kills runs until `outcome` has all its cases."""
    whole = Whole.of(work / "whole", STEPS)
    moments, choices = random.Random(seed), modes_and_optimizers(seed)
    # How long the last run took to its first checkpoint.
    start_s, number = 1.0, 0
    while outcome.cases < outcome.planned and time.monotonic() < outcome.until:
        number += 1
        run_dir, kills = work / f"run-{number}", []
        while len(kills) < min(KILLS_A_RUN, outcome.planned - outcome.cases):
            overrides, early = next(choices), moments.random() < 0.5
            before, leftovers, begin = newest(run_dir), _unfinished(run_dir), time.monotonic()
            process = start(run_dir, overrides, STEPS)
            if not early:
                _wait_for_checkpoint_after(before, run_dir)
                start_s = time.monotonic() - begin
            time.sleep(moments.uniform(0, start_s if early else AFTER_CHECKPOINT_S))
            after_s = time.monotonic() - begin
            os.kill(process, signal.SIGKILL)
            ended = wait(process, run_dir)
            if ended.status == 0:
                # It had reached its last step.
                break
            reached = newest(run_dir)
            saving = _unfinished(run_dir) - leftovers
            kind = "while saving" if saving else "while starting" if reached == before else "while training"
            problem = ended.problem(-signal.SIGKILL) or whole.problem(run_dir)
            if reached < before:
                problem = f"the checkpoint of step {before} is gone"
            case = f"{run_dir.name}, {' '.join(overrides)}, {kind} after {after_s:.3f} s, at step {reached}"
            kills.append((kind, case, problem))
        end = run(run_dir, next(choices), STEPS).problem() or whole.problem(run_dir, STEPS)
        for kind, case, problem in kills:
            outcome.add(kind, case, problem or end)


def _unfinished(run_dir: Path) -> set[int]:
    """Returns the folders that saves have not finished, as inodes."""
    return {folder.stat().st_ino for folder in partials_in(run_dir / CHECKPOINTS_FOLDER)}


def _wait_for_checkpoint_after(step: int, run_dir: Path) -> None:
    deadline = time.monotonic() + LIMIT_S
    while newest(run_dir) == step < STEPS and time.monotonic() < deadline:
        time.sleep(0.001)
