"""The terminal of a sweep: a line that moves for the job that runs, and a line for each that has ended.

What a job prints is in its log. A pipe gets the lines of jobs that have ended alone.
"""

from __future__ import annotations

import re
import shutil
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from hydra.core.utils import filter_overrides
from tqdm import tqdm

from training.sweeps.job import SweepJob
from training.visible_text import visible

LOOK_S = 0.5
# The end of a log in which the last logged step is looked for.
TAIL_BYTES = 8192
STEP = re.compile(rb"^step +(\d+/\d+) .*?(ETA \S+)?$", re.MULTILINE)


def title_of(job: SweepJob, place: int, jobs: Sequence[SweepJob]) -> str:
    """Names the one of `jobs` that is the `place`-th to run, by what tells it from the others."""
    given = filter_overrides(job.overrides)
    own = [each for each in given if not all(each in other.overrides for other in jobs)]
    return visible(f"job {job.number} ({place} of {len(jobs)}): {' '.join(own or given)}")


def announce(title: str, job: SweepJob) -> None:
    """Prints the title of a job, and whether it has ended before."""
    finished = "" if job.exit_status is None else ": finished earlier, and not run again"
    print(f"{title}{finished}", flush=True)


@contextmanager
def following(title: str, log: Path, stream: TextIO | None = None) -> Iterator[None]:
    """Shows on a terminal the title of a job and its last logged step, until the block ends. Other streams get nothing.

    `log` is where the job of the block writes what it prints, behind what an earlier one has written there.
    """
    stream = stream or sys.stdout
    if not stream.isatty():
        yield
        return
    begin, ended = log.stat().st_size if log.exists() else 0, threading.Event()
    with tqdm(file=stream, bar_format="{desc}", leave=False) as line:

        def follow() -> None:
            is_over = False
            while not is_over:
                progress = progress_in(log, begin)
                room = shutil.get_terminal_size().columns - len(progress) - 3
                line.set_description_str(f"{title[:room]}  {progress}")
                is_over = ended.wait(LOOK_S)

        thread = threading.Thread(target=follow, daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()


def progress_in(log: Path, begin: int) -> str:
    """Returns the last logged step in `log` behind its first `begin` bytes, with the time that is left."""
    try:
        with open(log, "rb") as file:
            size = file.seek(0, 2)
            file.seek(max(begin, size - TAIL_BYTES))
            steps = STEP.findall(file.read())
    except FileNotFoundError:
        steps = []
    if not steps:
        return "starting"
    return b"  ".join((b"step " + steps[-1][0], steps[-1][1])).decode(errors="replace").rstrip()


def print_ended(title: str, job: SweepJob, seconds: float) -> None:
    """Prints a line on a job that has ended: its time and its result, or why it failed and where its log is."""
    status, reason = job.outcome
    if job.succeeded:
        loss, step_ms = (job.summary.get(key) for key in ("train/final_loss", "perf/step_ms"))
        figures = [f"{status} in {tqdm.format_interval(seconds)}"]
        figures += [] if loss is None else [f"loss {loss:.4f}"]
        figures += [] if step_ms is None else [f"{step_ms:,.1f} ms a step"]
        print(f"{title}: {', '.join(figures)}", flush=True)
    else:
        print(f"{title}: {status}: {reason}; log: {visible(str(job.log))}", flush=True)
