"""Sweeps in which every job has a process of its own.

Otherwise peaks, caches, streams and crashes of one job would affect the next. A job is the same command as a single
run, in a numbered directory of the sweep; one that fails or is killed gets a row in the closing comparison, and the
other jobs still run.
"""

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, filter_overrides, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from training.errors import UserError, first_line
from training.metrics.files import read_summary, write_summary
from training.runs.directory import holds_results
from training.runs.failures import INTERRUPTED
from training.runs.files import CONFIG_FILE, SUMMARY_FILE
from training.runs.signals import SIGNALS, once_per_request

# Keys that each job gets values of its own for.
REPLACED = (
    "hydra.mode=",
    "hydra.run.dir=",
    "hydra.sweep.dir=",
    "hydra.sweep.subdir=",
    "hydra.job.num=",
    "hydra.job.id=",
)
# Hydra makes plugins only of classes named below this package.
PLUGIN_NAME = "hydra_plugins.process.ProcessLauncher"


def register_launcher() -> None:
    """Makes the launcher known to Hydra as `hydra/launcher: process`."""
    Plugins.instance().class_name_to_class[PLUGIN_NAME] = ProcessLauncher
    ConfigStore.instance().store(group="hydra/launcher", name="process", node={"_target_": PLUGIN_NAME})


@dataclass
class SweepJob:
    """One job of a sweep, and how it ended."""

    number: int
    overrides: list[str]
    directory: Path
    exit_status: int | None = None
    """as in subprocess: a negative one is the signal that ended the process; None: not ended"""
    summary: dict[str, Any] = field(default_factory=dict)
    sent: set[int] = field(default_factory=set)
    """the signals that the sweep sent it while it ran"""
    refused: bool = False
    """True: its directory has the results of an earlier run, which it left as they were"""

    @property
    def outcome(self) -> tuple[str, str]:
        """The status in a word, and the reason in a line."""
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
        if status == "ok":
            return "failed", f"exit status {self.exit_status}"
        return status, self.summary.get("reason") or f"exit status {self.exit_status}"


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep one after another, each in a fresh Python process.

    The return value of a job is its summary.json as a dict, or None if it wrote none. A job that did not end well has
    the status FAILED, and reading its return value raises UserError.
    """

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self._hydra_context = hydra_context
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a job for each list of overrides. Ctrl-C or SIGTERM ends the process with exit status 130."""
        from training.metrics.wandb_tracker import SWEEP_GROUP_VARIABLE

        setup_globals()
        sweep_dir = Path(self._config.hydra.sweep.dir)
        configs = [
            self._job_config(number, overrides) for number, overrides in enumerate(job_overrides, initial_job_idx)
        ]
        jobs = [
            SweepJob(config.hydra.job.num, list(overrides), sweep_dir / str(config.hydra.sweep.subdir))
            for config, overrides in zip(configs, job_overrides, strict=True)
        ]
        environment = os.environ | {SWEEP_GROUP_VARIABLE: "-".join(sweep_dir.parts[-2:])}
        try:
            with _signals_interrupt():
                for job in jobs:
                    print(f"\njob {job.number}: {_title(job)}", flush=True)
                    _run(job, self._command(job), environment)
        except KeyboardInterrupt:
            _close(jobs, sweep_dir)
            sys.exit(INTERRUPTED)
        _close(jobs, sweep_dir)
        return [_job_return(job, config) for job, config in zip(jobs, configs, strict=True)]

    def _job_config(self, number: int, overrides: Sequence[str]) -> DictConfig:
        config = self._hydra_context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        # `${hydra:...}` in the name of the job's directory reads this global.
        HydraConfig.instance().set_config(config)
        return config

    def _command(self, job: SweepJob) -> list[str]:
        hydra = self._config.hydra
        # The options of the interpreter, and the script or `-m module`, as they were given.
        program = [sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1]]
        flags = ["--config-name", hydra.job.config_name]
        for source in hydra.runtime.config_sources:
            path = f"pkg://{source.path}" if source.schema == "pkg" else source.path
            if source.provider == "main":
                flags += ["--config-path", path]
            elif source.provider == "command-line":
                flags += ["--config-dir", path]
        # Not resolved: a key that they refer to may exist only in the job.
        given = OmegaConf.to_container(hydra.overrides.hydra, resolve=False)
        return [
            *program,
            *flags,
            *(override for override in given if not override.lstrip("+").startswith(REPLACED)),
            *job.overrides,
            "hydra.mode=RUN",
            f"hydra.run.dir={_quote(job.directory)}",
            f"hydra.sweep.dir={_quote(hydra.sweep.dir)}",
            f"hydra.job.num={job.number}",
            f"hydra.job.id={job.number}",
        ]


def _run(job: SweepJob, command: list[str], environment: dict[str, str]) -> None:
    """Runs the job's process to its end, and completes its summary."""
    earlier = _written(job.directory) if holds_results(job.directory) else None
    if earlier is None:
        # The reason why an earlier job failed must not be taken for the outcome of this one.
        (job.directory / SUMMARY_FILE).unlink(missing_ok=True)
    # In a process group of its own: Ctrl-C on the terminal reaches the sweep alone, which passes it on once, and the
    # processes that the job started can be ended with it. Such a group cannot read from the terminal.
    process = subprocess.Popen(command, env=environment, process_group=0, stdin=subprocess.DEVNULL)
    try:
        process.wait()
    except KeyboardInterrupt:
        with suppress(KeyboardInterrupt):
            # Not SIGINT: in the background, sweep and jobs ignore it.
            _send(job, process, signal.SIGTERM)
            # Printing fails if the terminal was closed, which may be the cause of the signal.
            with suppress(OSError):
                print(f"waiting for job {job.number} to finish its step and save; a second signal kills it", flush=True)
            process.wait()
        raise
    finally:
        _send(job, process, signal.SIGKILL)
        # The processes that it started and left.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        job.exit_status = process.wait()
        job.refused = job.exit_status != 0 and earlier is not None and _written(job.directory) == earlier
        if not job.refused:
            job.summary = _summary(job.directory)
            _record_outcome(job)


def _send(job: SweepJob, process: subprocess.Popen, number: signal.Signals) -> None:
    if process.poll() is None:
        job.sent.add(number)
        process.send_signal(number)


def _written(directory: Path) -> list[tuple[int, int] | None]:
    """Returns inode and time of the files that a run writes first and last: if they change, a job has written them."""
    paths = [directory / name for name in (CONFIG_FILE, SUMMARY_FILE)]
    return [(path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None for path in paths]


@contextmanager
def _signals_interrupt() -> Iterator[None]:
    """Within the block, SIGTERM and SIGHUP end a sweep as Ctrl-C does, so that no job is left running."""
    # A signal that is ignored, as under nohup, stays ignored.
    signals = [s for s in (*SIGNALS, signal.SIGHUP) if signal.getsignal(s) is not signal.SIG_IGN]
    handler = once_per_request(signal.default_int_handler)
    before = {s: signal.signal(s, handler) for s in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _job_return(job: SweepJob, config: DictConfig) -> JobReturn:
    """Converts the outcome of a job into Hydra's."""
    hydra_config = OmegaConf.masked_copy(config, "hydra")
    task_config = OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])
    result = JobReturn(job.overrides, task_config, hydra_config, os.getcwd(), config.hydra.job.name)
    if job.exit_status == 0:
        result.status, result.return_value = JobStatus.COMPLETED, job.summary or None
    else:
        status, reason = job.outcome
        result.status, result.return_value = JobStatus.FAILED, UserError(f"job {job.number} {status}: {reason}")
    return result


def _summary(directory: Path) -> dict[str, Any]:
    # A script other than train.py may write none, and neither does a job that is killed.
    with suppress(UserError):
        return read_summary(directory)
    return {}


def _record_outcome(job: SweepJob) -> None:
    """Writes into a job's summary how it ended, if the job could not do that itself; keeps the rest of the summary."""
    status, reason = job.outcome
    if status == job.summary.get("status"):
        return
    job.summary |= {"status": status, "reason": reason}
    with suppress(UserError, OSError):
        job.directory.mkdir(parents=True, exist_ok=True)
        write_summary(job.directory, job.summary)


def _close(jobs: Sequence[SweepJob], sweep_dir: Path) -> None:
    """Compares the jobs on the terminal and in the sweep's directory; if that fails, prints how each one ended."""
    ended = [job for job in jobs if job.exit_status is not None]
    try:
        from training.comparison.report import compare

        if ended:
            compare([sweep_dir], sweep_dir)
    except (Exception, KeyboardInterrupt) as error:
        for job in ended:
            print(f"job {job.number}: {': '.join(filter(None, job.outcome))}")
        again = f"python scripts/compare.py {shlex.quote(str(sweep_dir))}"
        print(f"warning: the comparison failed ({first_line(error)}); try again: {again}", file=sys.stderr)
    for job in ended:
        if job.refused:
            kept = f"{job.directory} has an earlier run, which is left as it was"
            print(f"job {job.number}: {': '.join(filter(None, job.outcome))}; {kept}")
    if not_run := [job.number for job in jobs if job.exit_status is None]:
        numbers = f"{not_run[0]}{f' to {not_run[-1]}' if not_run[1:] else ''}"
        print(f"not run, because the sweep was interrupted: {numbers}")
    sys.stdout.flush()


def _title(job: SweepJob) -> str:
    return " ".join(filter_overrides(job.overrides))


def _quote(path: str | Path) -> str:
    """Quotes a path for Hydra's override grammar: paths may have spaces, commas and equal signs."""
    return "'" + str(path).replace("'", "\\'") + "'"
