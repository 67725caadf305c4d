"""One job of a sweep: its process, the limits of its time, how it ended, and its lines on the terminal.

The terminal shows one line with the progress while a job runs, and one with its result when it has ended; a pipe gets
the second line alone. What the job itself prints goes to its log.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from hydra.core.utils import filter_overrides
from tqdm import tqdm

from training.errors import UserError
from training.runs.directory import holds_results
from training.runs.failures import FAILED
from training.runs.files import CONFIG_FILE, SUMMARY_FILE
from training.runs.records import read_summary, write_summary
from training.runs.starting import INTERRUPTED
from training.visible_text import visible

# Seconds of a wait for a process that may take for ever. A wait without limit would leave a signal that comes as it
# begins, or on another thread, until the process has ended.
NO_LIMIT_S = threading.TIMEOUT_MAX
# Seconds that a job which was asked to end may take to save before it is killed: a checkpoint of 100 GiB takes minutes.
GRACE_S = 300.0
LOOK_S = 0.5
# The last logged step is looked for in so many bytes at the end of a log.
TAIL_BYTES = 8192
STEP = re.compile(rb"^step +(\d+/\d+) .*?(ETA \S+)?$", re.MULTILINE)
ERROR = re.compile(rb"^error: (.+)$", re.MULTILINE)


@dataclass
class SweepJob:
    """One job of a sweep, and how it ended.

    Attributes:
        timeout_min: minutes after which the job is asked to save and end.
        grace_s: seconds after that request until the job is killed.
        exit_status: that of its process; minus the number of the signal that ended it; None: it has not ended.
        sent: the signals that the sweep has sent to it.
        queued: whether a scheduler has the job, and runs it even if the sweep's process ends.
        refused: whether the job refused to run because its directory has results of an earlier run.
        log: the file to which the output of the job is added; None: the output goes to that of this process.
        log_begin: the bytes that the log had before.
    """

    number: int
    overrides: list[str]
    directory: Path
    timeout_min: float | None = None
    grace_s: float = field(default_factory=lambda: GRACE_S)
    exit_status: int | None = None
    summary: dict[str, Any] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    queued: bool = False
    timed_out: bool = False
    refused: bool = False
    log: Path | None = None
    log_begin: int = 0
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def outcome(self) -> tuple[str, str]:
        """The status in a word, and the reason in a line."""
        status, reason = map(visible, self._outcome())
        if not self.timed_out or status == "ok":
            return status, reason
        limit = f"hydra.launcher.timeout_min={self.timeout_min:g} was over: "
        # The summary has it already once the outcome was recorded.
        return status, limit + reason.removeprefix(limit)

    @property
    def succeeded(self) -> bool:
        """Tells whether the job did what it was asked to do, or saved itself on a signal that was not the sweep's."""
        return self.exit_status == 0 and (not self.timed_out or self.outcome[0] == "ok")

    def run(self, command: Sequence[str], environment: Mapping[str, str], early_s: float = 0) -> None:
        """Runs the job's process to its end, and completes its summary.

        The job is asked to end `early_s` seconds before its time limit, but not in the first half of its time. Raises
        KeyboardInterrupt, once the job has ended, if the sweep is interrupted meanwhile.
        """
        earlier = _written(self.directory) if holds_results(self.directory) else None
        if earlier is None:
            # The reason why an earlier job failed must not be taken for the outcome of this one.
            (self.directory / SUMMARY_FILE).unlink(missing_ok=True)
        try:
            # In a process group of its own: Ctrl-C on the terminal reaches the sweep alone, which passes it on once,
            # and the processes that the job started can be ended with it. It cannot read from the terminal.
            if self.log is not None:
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self.log_begin = self.log.stat().st_size if self.log.exists() else 0
            with nullcontext() if self.log is None else open(self.log, "ab") as log:
                process = subprocess.Popen(
                    command,
                    env={**environment, **self.environment},
                    process_group=0,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
        except OSError as error:
            self.exit_status = FAILED
            self.summary = {"reason": f"its process could not be started ({error.strerror})"}
            self._record_outcome()
            return
        try:
            self._wait(process, early_s)
        except KeyboardInterrupt:
            with suppress(KeyboardInterrupt):
                self._ask_to_end(process)
                # Printing fails if the terminal was closed, which may be the cause of the signal.
                with suppress(OSError):
                    wait = f"waiting for job {self.number} to finish its step and save; a second signal kills it"
                    tell(wait)
                process.wait(NO_LIMIT_S)
            raise
        finally:
            self._send(process, signal.SIGKILL)
            # The processes that it started and left.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            self.exit_status = process.wait()
            self.refused = self.exit_status != 0 and earlier is not None and _written(self.directory) == earlier
            if not self.refused:
                self.summary = summary_in(self.directory)
                self._record_outcome()

    def lose(self, reason: str) -> None:
        """Notes that the job ended, and that it is not known how; `reason` is one line."""
        self.exit_status, self.summary = FAILED, {"status": "killed", "reason": reason}
        self.refused = (self.directory / SUMMARY_FILE).exists() and holds_results(self.directory)
        if not self.refused:
            self._write_summary()

    def _wait(self, process: subprocess.Popen, early_s: float) -> None:
        """Waits for the end of the process, and ends one that takes too long."""
        try:
            limit_s = NO_LIMIT_S if self.timeout_min is None else self.timeout_min * 60
            process.wait(max(limit_s - early_s, limit_s / 2))
        except subprocess.TimeoutExpired:
            self.timed_out = True
            self._ask_to_end(process)
            limit = f"hydra.launcher.timeout_min={self.timeout_min:g}"
            tell(f"job {self.number}: {limit} is over: it is to save and end, within {self.grace_s:.0f} s")
            with suppress(subprocess.TimeoutExpired):
                process.wait(self.grace_s)

    def _ask_to_end(self, process: subprocess.Popen) -> None:
        # Not SIGINT: in the background, sweep and jobs ignore it. A second signal would end the job unsaved.
        if signal.SIGTERM not in self.sent:
            self._send(process, signal.SIGTERM)
            # A stopped process takes no other signal before this one.
            self._send(process, signal.SIGCONT)

    def _send(self, process: subprocess.Popen, number: signal.Signals) -> None:
        if process.poll() is None:
            self.sent.add(number)
            process.send_signal(number)

    def _outcome(self) -> tuple[str, str]:
        if self.exit_status is None:
            return "not run", "the sweep was interrupted"
        if self.exit_status == 0:
            return self.summary.get("status", "ok"), self.summary.get("reason") or ""
        if -self.exit_status in self.sent:
            return "interrupted", "ended before its step was done and saved"
        if self.exit_status < 0:
            name = signal.Signals(-self.exit_status).name
            return "killed", name + (", as the kernel does when the host is out of memory" if name == "SIGKILL" else "")
        # Interrupted before it could write a summary.
        if self.exit_status == INTERRUPTED and not self.summary:
            return "interrupted", "interrupted"
        status = self.summary.get("status", "ok")
        # A process that fails after its summary said ok failed all the same.
        # Another run that writes to its directory, say: it may not write the reason there.
        said = [] if self.log is None else ERROR.findall(tail_of(self.log, self.log_begin))
        reason = said[-1].decode(errors="replace") if said else f"exit status {self.exit_status}"
        return "failed" if status == "ok" else status, self.summary.get("reason") or reason

    def _record_outcome(self) -> None:
        """Writes into the summary how the job ended, if the job could not do that itself; keeps the rest of it."""
        status, reason = self.outcome
        if (status, reason) == (self.summary.get("status"), self.summary.get("reason") or ""):
            return
        self.summary |= {"status": status, "reason": reason}
        self._write_summary()

    def _write_summary(self) -> None:
        with suppress(UserError, OSError):
            self.directory.mkdir(parents=True, exist_ok=True)
            write_summary(self.directory, self.summary)


def tell(text: str) -> None:
    """Prints a line above one that moves on the terminal."""
    tqdm.write(text)
    sys.stdout.flush()


def summary_in(directory: Path) -> dict[str, Any]:
    """Returns the summary of the run in `directory`; empty if there is none that can be read."""
    # A script other than train.py may write none, and neither does a job that is killed.
    with suppress(UserError):
        return read_summary(directory)
    return {}


def _written(directory: Path) -> list[tuple[int, int] | None]:
    """Returns inode and time of the files that a run writes first and last: if they change, a job has written them."""
    paths = [directory / name for name in (CONFIG_FILE, SUMMARY_FILE)]
    return [(path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None for path in paths]


def title_of(job: SweepJob, place: int, jobs: Sequence[SweepJob]) -> str:
    """Returns the title of `job`, which runs as number `place` of `jobs`: with the overrides that not all jobs have."""
    given = filter_overrides(job.overrides)
    own = [each for each in given if not all(each in other.overrides for other in jobs)]
    return visible(f"job {job.number} ({place} of {len(jobs)}): {' '.join(own or given)}")


def announce(title: str, job: SweepJob) -> None:
    """Prints the title of a job, and whether it has ended before."""
    finished = "" if job.exit_status is None else ": finished earlier, and not run again"
    print(f"{title}{finished}", flush=True)


@contextmanager
def following(title: str, log: Path, stream: TextIO | None = None) -> Iterator[None]:
    """On a terminal, shows a job's title and the last step in its `log` until the block ends; elsewhere nothing."""
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
    """Returns the last logged step in `log`, with the time left; its first `begin` bytes are of an earlier start."""
    steps = STEP.findall(tail_of(log, begin))
    if not steps:
        return "starting"
    return b"  ".join((b"step " + steps[-1][0], steps[-1][1])).decode(errors="replace").rstrip()


def tail_of(log: Path, begin: int) -> bytes:
    """Returns the last bytes of `log` behind its first `begin`; none of a file that is not there."""
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, file.seek(0, 2) - TAIL_BYTES))
            return file.read()
    except FileNotFoundError:
        return b""


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
