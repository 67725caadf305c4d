"""Sweeps in which every job has a process of its own.

Otherwise peaks, caches, streams and crashes of one job would affect the next. A job is the same command as a single
run, in a numbered directory of the sweep; one that fails, is killed or takes too long gets a row in the closing
comparison, and the other jobs still run. With resume=auto the same sweep in the same directory runs what is missing.
"""

import math
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from training.checkpoints.changes import MAY_CHANGE, changed_values
from training.config.declare import AUTO, SETTLED
from training.errors import UserError, first_line
from training.metrics.run_names import SWEEP_GROUP_VARIABLE, SWEEP_LABEL_VARIABLE
from training.parallel.world import refuse_sweep
from training.runs.bounded_files import DamagedError, parse_yaml
from training.runs.checkpoint_files import read_config
from training.runs.directory import has_records, holds_results, refuse_program_folder
from training.runs.files import CONSOLE_FILE, WANDB_FOLDER
from training.runs.invocation import quoted
from training.runs.signals import PARENT_VARIABLE, once_per_request, signals_not_ignored
from training.runs.starting import INTERRUPTED
from training.sweeps.job import SweepJob, announce, following, print_ended, summary_in, title_of
from training.visible_text import visible

# Keys that each job gets values of its own for.
REPLACED = tuple(f"hydra.{key}=" for key in ("mode", "run.dir", "sweep.dir", "sweep.subdir", "job.num", "job.id"))
# Hydra makes plugins only of classes named below this package.
PLUGIN_NAME = "hydra_plugins.process.ProcessLauncher"

# The interpreter with its options, and the script or `-m module`, as they were given. Made here, at the start, because
# train.py changes the arguments behind it.
PROGRAM = (sys.executable, *sys.orig_argv[1 : len(sys.orig_argv) - len(sys.argv) + 1])
# Keys that a job may be continued with at other values, because it stays the same row of the sweep; and those of them
# with which a finished job is still finished.
JOB_MAY_CHANGE = tuple(key for key in MAY_CHANGE if not key.startswith(("offload", "recompute", "optimizer", "plan")))
OF_NO_EFFECT = ("resume", "force", "tracking.*", "checkpoint.*")


@dataclass
class LauncherOptions:
    """The keys of `hydra.launcher`. `timeout_min`: minutes that a job may take; null for no limit."""

    _target_: str = PLUGIN_NAME
    timeout_min: float | None = None


def register_launcher() -> None:
    """Makes the launcher known to Hydra as `hydra/launcher: process`."""
    Plugins.instance().class_name_to_class[PLUGIN_NAME] = ProcessLauncher
    ConfigStore.instance().store(group="hydra/launcher", name="process", node=LauncherOptions)


class ProcessLauncher(Launcher):
    """Runs the jobs of a sweep one after another, each in a fresh Python process.

    The value that Hydra gets of a job is its summary.json, or None. To read the value of a job that failed raises
    UserError, which names all failed jobs.
    """

    def __init__(self, timeout_min: float | None = None):
        self._timeout_min = timeout_min

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        # Here, because the sweeper writes its first file before `launch`.
        refuse_program_folder(Path(config.hydra.sweep.dir), "hydra.sweep.dir=multirun/NAME")
        refuse_sweep()
        self._hydra_context = hydra_context
        self._config = config

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Runs a job for each list of overrides. Ctrl-C or SIGTERM ends the process with exit status 130.

        Raises UserError for a time limit that is not above 0, for resume=auto in the directory of another sweep, and
        without it in that of an earlier one.
        """
        setup_globals()
        self._check_options()
        sweep_dir = Path(self._config.hydra.sweep.dir)
        configs, jobs = [], []
        for number, overrides in enumerate(job_overrides, initial_job_idx):
            config = self._job_config(number, overrides)
            directory = sweep_dir / str(config.hydra.sweep.subdir)
            job = SweepJob(number, list(overrides), directory, self._timeout_min)
            resume = OmegaConf.select(config, "resume", throw_on_resolution_failure=False)
            if "resume" in config and resume is None and has_records(directory):
                raise UserError(
                    f"{directory} has a run of an earlier sweep: resume=auto runs what is missing of it, another"
                    " hydra.sweep.dir begins a new one"
                )
            if resume == AUTO and is_finished(job, _task_config(config)):
                job.exit_status, job.summary = 0, summary_in(job.directory)
            configs.append(config)
            jobs.append(job)
        tell_apart(jobs, configs, sweep_dir)
        try:
            with signals_interrupt():
                self._run(jobs, configs, "-".join(sweep_dir.parts[-2:]))
        except KeyboardInterrupt:
            _close(jobs, sweep_dir)
            sys.exit(INTERRUPTED)
        _close(jobs, sweep_dir)
        return _job_returns(jobs, configs)

    def _check_options(self) -> None:
        """Raises UserError for options of `hydra.launcher` that cannot be."""
        limit = self._timeout_min
        if limit is not None and not 0 < limit < math.inf:
            raise UserError(f"hydra.launcher.timeout_min={limit:g}: must be minutes above 0, or null for no limit")

    def _run(self, jobs: Sequence[SweepJob], configs: Sequence[DictConfig], group: str) -> None:
        """Runs the jobs that have no exit status yet, whose runs in wandb are one `group`. Ctrl-C interrupts it."""
        # The reference first: what the others are compared with.
        pairs = zip(jobs, configs, strict=True)
        in_order = sorted(pairs, key=lambda pair: pair[1].hydra.runtime.choices.get("offload") != "none")
        for place, (job, _) in enumerate(in_order, start=1):
            title = title_of(job, place, jobs)
            if job.exit_status is not None:
                announce(title, job)
                continue
            job.log, begin_s = job.directory / CONSOLE_FILE, time.monotonic()
            with following(title, job.log):
                job.run(self._command(job), job_environment(group))
            print_ended(title, job, time.monotonic() - begin_s)

    def _job_config(self, number: int, overrides: Sequence[str]) -> DictConfig:
        config = self._hydra_context.config_loader.load_sweep_config(self._config, list(overrides))
        with open_dict(config):
            config.hydra.job.id = config.hydra.job.num = number
        # `${hydra:...}` in the name of the job's directory reads this global.
        HydraConfig.instance().set_config(config)
        return config

    def _command(self, job: SweepJob) -> list[str]:
        hydra = self._config.hydra
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
            *PROGRAM,
            *flags,
            *(override for override in given if not override.lstrip("+").startswith(REPLACED)),
            *job.overrides,
            "hydra.mode=RUN",
            f"hydra.run.dir={quoted(job.directory)}",
            f"hydra.sweep.dir={quoted(hydra.sweep.dir)}",
            f"hydra.job.num={job.number}",
            f"hydra.job.id={job.number}",
        ]


def is_finished(job: SweepJob, config: DictConfig) -> bool:
    """Tells whether `job` is done already, in an earlier start of this sweep.

    Raises UserError if its directory has results of another configuration.
    """
    if not holds_results(job.directory):
        return False
    try:
        changed = changed_values(config, read_config(job.directory))
        # The earlier job has replaced these values by those that it chose.
        changed = {name: values for name, values in changed.items() if values[1] != SETTLED.get(name)}
    except OmegaConfBaseException:
        # A reference that leads nowhere. The job refuses it.
        return False
    except DamagedError as error:
        raise UserError(f"resume=auto: {error}: choose another hydra.sweep.dir, or delete that directory") from None
    for name, (was, now) in changed.items():
        if not _matches(name, JOB_MAY_CHANGE):
            raise UserError(
                f"resume=auto: {job.directory} has a run of another sweep, {name}: was {was}, is {now}: give the"
                " overrides of that sweep in their order, or choose another hydra.sweep.dir"
            )
    return summary_in(job.directory).get("status") == "ok" and all(_matches(name, OF_NO_EFFECT) for name in changed)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def job_environment(group: str) -> dict[str, str]:
    """Returns the environment of a job that this process starts; `group` is that of its sweep in wandb."""
    return os.environ | {SWEEP_GROUP_VARIABLE: group, PARENT_VARIABLE: str(os.getpid())}


def tell_apart(jobs: Sequence[SweepJob], configs: Sequence[DictConfig], sweep_dir: Path) -> None:
    """Gives each job the name of its row in the comparison, and one folder for the files that wandb has of all jobs."""
    from training.comparison.rows import build_rows
    from training.comparison.runs import Run

    runs = []
    for job, config in zip(jobs, configs, strict=True):
        choices = {key: str(value) for key, value in config.hydra.runtime.choices.items() if value is not None}
        try:
            values = parse_yaml(OmegaConf.to_yaml(_task_config(config), resolve=True))
        except (OmegaConfBaseException, DamagedError):
            # The job refuses it.
            values = {}
        runs.append(Run(job.directory, "running", config=values, choices=choices))
    labels = {id(run): row.name for row in build_rows(runs) for run in row.runs}
    for job, run in zip(jobs, runs, strict=True):
        job.environment = {SWEEP_LABEL_VARIABLE: visible(labels[id(run)])}
        if "WANDB_DIR" not in os.environ:
            job.environment["WANDB_DIR"] = str(sweep_dir.absolute())


def _task_config(config: DictConfig) -> DictConfig:
    return OmegaConf.masked_copy(config, [key for key in config if key != "hydra"])


@contextmanager
def signals_interrupt(*more: signal.Signals) -> Iterator[None]:
    """Inside the block, makes SIGTERM, SIGHUP and `more` interrupt the sweep as Ctrl-C does: no job is left running."""
    handler = once_per_request(signal.default_int_handler)
    before = {number: signal.signal(number, handler) for number in (*signals_not_ignored(), *more)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _job_returns(jobs: Sequence[SweepJob], configs: Sequence[DictConfig]) -> list[JobReturn]:
    """Converts the outcomes of the jobs into Hydra's, which ends with the error of the first that has one."""
    error = UserError(_failures_of(jobs))
    returns: list[JobReturn] = []
    for job, config in zip(jobs, configs, strict=True):
        hydra_config = OmegaConf.masked_copy(config, "hydra")
        parts = job.overrides, _task_config(config), hydra_config, os.getcwd(), config.hydra.job.name
        if job.succeeded:
            returns.append(JobReturn(*parts, JobStatus.COMPLETED, job.summary or None))
        else:
            returns.append(_FailedJob(*parts, JobStatus.FAILED, error))
    return returns


class _FailedJob(JobReturn):
    """Raises the error alone; Hydra would print the overrides of this one job first."""

    @property
    def return_value(self) -> Any:
        raise self._return_value


def _failures_of(jobs: Sequence[SweepJob]) -> str:
    """Returns one line with all jobs that did not end well and why; those that ended alike are named together."""
    numbers: dict[tuple[str, str], list[str]] = {}
    for job in jobs:
        if not job.succeeded:
            numbers.setdefault(job.outcome, []).append(str(job.number))
    alike = []
    for (status, reason), same in numbers.items():
        word, verb = ("jobs", "do") if same[1:] else ("job", "does")
        ended = f"{verb} not fit" if status == "planned" else status
        alike.append(f"{word} {', '.join(same)} {ended}: {reason}")
    return "; ".join(alike)


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
        print(f"warning: the comparison failed ({visible(first_line(error))}); try again: {again}", file=sys.stderr)
    if any((sweep_dir / WANDB_FOLDER).glob("offline-run-*")):
        folder = shlex.quote(str(sweep_dir / WANDB_FOLDER))
        print(f"wandb   wandb sync {folder} uploads all runs, wandb leet {folder} shows them in the terminal")
    for job in ended:
        if job.refused:
            kept = f"{job.directory} has an earlier run, which is left as it was"
            print(f"job {job.number}: {': '.join(filter(None, job.outcome))}; {kept}")
    if not_run := [job.number for job in jobs if job.exit_status is None and not job.queued]:
        print(f"not run, because the sweep was interrupted: {', '.join(map(str, not_run))}")
    sys.stdout.flush()
