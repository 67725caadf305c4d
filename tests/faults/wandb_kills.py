"""The process of wandb killed at random moments of a run: the run goes on, with one warning and all its results."""

from __future__ import annotations

import os
import random
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import psutil

from tests.faults.outcome import Outcome
from tests.faults.runs import LIMIT_S, Ended, Whole, modes_and_optimizers, start, wait
from training.runs.files import METRICS_FILE

STEPS = 8
LATER_S = 0.2
# It has the id of the run in wandb.
TRACKED = ("state.json",)


def survey(work: Path, outcome: Outcome, seed: int) -> None:
    """Kills wandb's process in `outcome.planned` runs."""
    # Imported once, here; it starts its process in the runs.
    import wandb  # noqa: F401

    whole, choices = Whole.of(work / "whole", STEPS), modes_and_optimizers(seed)
    moments = random.Random(seed)
    for number in outcome.in_time(range(outcome.planned)):
        run_dir, overrides = work / f"run-{number}", next(choices)
        step, later_s = moments.randrange(STEPS + 1), moments.uniform(0, LATER_S)
        ended = _run(run_dir, overrides, step, later_s)
        warned = ended.output.count("tracking stopped")
        problem = ended.problem() or whole.problem(run_dir, STEPS, TRACKED)
        if "Traceback" in ended.output or warned > 1:
            problem = problem or f"more than one warning: {ended.output[-500:]!r}"
        kind = "with a warning" if warned else "too late to matter"
        outcome.add(kind, f"{' '.join(overrides)}, {later_s:.3f} s after step {step}", problem)


def _run(run_dir: Path, overrides: tuple[str, ...], step: int, later_s: float) -> Ended:
    """Runs with wandb, and kills its process so many seconds after the record of `step`."""
    # The path of a socket must be short, and a killed process leaves it.
    with tempfile.TemporaryDirectory(prefix="w") as sockets:

        def alone() -> None:
            for variable in [name for name in os.environ if name.startswith("WANDB_")]:
                del os.environ[variable]
            os.environ["HOME"] = os.environ["TMPDIR"] = tempfile.tempdir = sockets

        process = start(run_dir, overrides, STEPS, keys={"tracking.mode": "offline"}, before=alone)
        service = _service_of(process)
        if service is not None:
            _wait_for_record(step, run_dir, process)
            time.sleep(later_s)
            with suppress(psutil.NoSuchProcess):
                service.kill()
        ended = wait(process, run_dir)
    return ended if service is not None else Ended(1, f"{ended.output}\nwandb started no process")


def _service_of(process: int) -> psutil.Process | None:
    """Waits until the run has started wandb's process, and returns it."""
    deadline = time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and _runs(process):
        for child in psutil.Process(process).children():
            # It may have ended since it was listed.
            with suppress(psutil.NoSuchProcess):
                if child.name().startswith("wandb-core"):
                    return child
        time.sleep(0.001)
    return None


def _wait_for_record(step: int, run_dir: Path, process: int) -> None:
    """Waits until the run has recorded `step` steps, or has ended."""
    path, deadline = run_dir / METRICS_FILE, time.monotonic() + LIMIT_S
    while time.monotonic() < deadline and _runs(process):
        if step == 0 or (path.exists() and path.read_bytes().count(b"\n") >= step):
            return
        time.sleep(0.001)


def _runs(process: int) -> bool:
    return psutil.Process(process).status() != psutil.STATUS_ZOMBIE
