"""Kills runs at random moments: `python kill_runs.py RUN_DIR KILLS SEED OVERRIDE...`; the last runs to its end.

Each run is `train.py` from its first line on, under an offload mode and an optimizer of its own, forked from a process
that has imported everything. Half of the kills fall between the start and about the first checkpoint, half after it,
where most of the time is spent in saves. Prints what each run was doing.
"""

from __future__ import annotations

import os
import random
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch._dynamo

import training.build
import training.loop  # noqa: F401, for the runs
from training.checkpoints.layout import checkpoints_in, partials_in
from training.runs.files import CHECKPOINTS_FOLDER

PROGRAM = Path(__file__).parents[3] / "train.py"
MODES = sorted(path.stem for path in (PROGRAM.parent / "conf" / "offload").glob("*.yaml"))
OPTIMIZERS = {"adamw": (), "host_adamw": ("optimizer.compile=off",)}
AFTER_CHECKPOINT_S = 0.2


def newest(run_dir: Path) -> Path | None:
    return next(iter(checkpoints_in(run_dir / CHECKPOINTS_FOLDER)), None)


def unfinished(run_dir: Path) -> set[int]:
    """The folders that saves have not finished, as inodes."""
    return {folder.stat().st_ino for folder in partials_in(run_dir / CHECKPOINTS_FOLDER)}


def forked(run_dir: Path, overrides: list[str]) -> int:
    """Starts a run in a process of its own, which ends with status 0 if it did well."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        # Whatever is raised may not return into the code of the parent.
        status = 1
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        try:
            sys.argv = [str(PROGRAM), f"hydra.run.dir={run_dir}", *overrides]
            runpy.run_path(str(PROGRAM), run_name="__main__")
            status = 0
        except SystemExit as error:
            status = error.code
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status or 0)
    return process


def wait_until(happened: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not happened() and time.monotonic() < deadline:
        time.sleep(0.001)


def main(run_dir: Path, kills: int, seed: int, overrides: list[str]) -> None:
    torch.set_num_threads(1)
    moments = random.Random(seed)
    run_dir.mkdir(parents=True)
    # How long the last run took to its first checkpoint.
    start_s = 1.0
    for kill in range(kills):
        mode, optimizer = moments.choice(MODES), moments.choice(sorted(OPTIMIZERS))
        before, leftovers, start = newest(run_dir), unfinished(run_dir), time.monotonic()
        process = forked(run_dir, [*overrides, f"offload={mode}", f"optimizer={optimizer}", *OPTIMIZERS[optimizer]])
        if kill % 2 == 0:
            time.sleep(moments.uniform(0, start_s))
        else:
            wait_until(lambda before=before: newest(run_dir) != before)
            start_s = time.monotonic() - start
            time.sleep(moments.uniform(0, AFTER_CHECKPOINT_S))
        os.kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        if status != signal.SIGKILL:
            sys.exit("a run ended before it was killed")
        saving = unfinished(run_dir) - leftovers
        doing = "saving" if saving else "starting" if newest(run_dir) == before else "training"
        print(f"killed while {doing} after {time.monotonic() - start:.2f} s: {mode} {optimizer}, {newest(run_dir)}")
    _, status = os.waitpid(forked(run_dir, overrides), 0)
    sys.exit(os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
