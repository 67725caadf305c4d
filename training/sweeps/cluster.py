"""Sweeps over a cluster: `hydra/launcher=submitit_slurm`.

The package hydra-submitit-launcher gives the options and submits the jobs. A job does what one of `launcher.py` does,
with its outcome written down; one that SLURM starts again, after preemption or the loss of its host, resumes.
"""

import importlib.util
import os
import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, make_dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from training.errors import UserError, first_line
from training.sweeps.job import SweepJob, announce, title_of
from training.sweeps.launcher import ProcessLauncher, job_environment, signals_interrupt

ROOT = Path(__file__).parents[2]
PACKAGE = "hydra-submitit-launcher"
OPTION = "hydra/launcher=submitit_slurm"
# Hydra makes plugins only of classes named below this package.
PLUGIN_NAME = "hydra_plugins.cluster.SlurmLauncher"
# Seconds between two checks of the jobs. The scheduler itself is asked once in ten minutes at most.
LOOK_S = 0.5
# The plugin's options that are not sbatch's or submitit's own.
FOLDER, RETRIES = "submitit_folder", "max_num_timeout"
# Seconds before SLURM's signal at which a job is asked to end.
BEFORE_SIGNAL_S = 5


def register_launcher() -> None:
    """Makes the launcher known to Hydra; without its package, it refuses a sweep in one line."""
    Plugins.instance().class_name_to_class[PLUGIN_NAME] = SlurmLauncher
    ConfigStore.instance().store(group="hydra/launcher", name="submitit_slurm", node=_options())


def _options() -> Any:
    if not is_installed():
        # Every key is taken, so that the error is that of the missing package.
        return OmegaConf.create({"_target_": PLUGIN_NAME}, flags={"struct": False})
    from hydra_plugins.hydra_submitit_launcher.config import SlurmQueueConf

    return make_dataclass("SlurmOptions", [("_target_", str, PLUGIN_NAME)], bases=(SlurmQueueConf,))


def is_installed() -> bool:
    """Tells whether the plugin and submitit are there, without importing them."""
    if importlib.util.find_spec("submitit") is None or importlib.util.find_spec("hydra_plugins") is None:
        return False
    return importlib.util.find_spec("hydra_plugins.hydra_submitit_launcher") is not None


@dataclass
class ClusterJob:
    """A job on the host that the scheduler gives it: it arrives as a pickle, and its outcome goes back as one.

    It is asked to end `early_s` seconds before its time limit.
    """

    job: SweepJob
    command: list[str]
    group: str
    early_s: float

    def __call__(self) -> SweepJob:
        """Runs the job to its end; returns it with exit status and summary."""
        command = self.command
        resumes = any(override.lstrip("+").startswith("resume=") for override in command)
        if int(os.environ.get("SLURM_RESTART_COUNT", 0)) and not resumes:
            command = [*command, "resume=auto"]
        # Under submitit, schedulers send SIGUSR2 before they end a job.
        with suppress(KeyboardInterrupt), signals_interrupt(signal.SIGUSR2):
            self.job.run(command, job_environment(self.group), self.early_s)
        if self.job.exit_status is None:
            self.job.lose("it was interrupted before its process had started")
        return self.job


class SlurmLauncher(ProcessLauncher):
    """Submits each job to SLURM, as one task on one host; the job starts its own ranks.

    It asks for `gpus_per_node` GPUs, or as many as the job has devices. An interrupted sweep leaves its jobs there.
    """

    def __init__(self, **options: Any):
        super().__init__(options.get("timeout_min"))
        self._options = options

    def _check_options(self) -> None:
        if not is_installed():
            raise UserError(f"{OPTION}: {PACKAGE} is missing: pip install {PACKAGE}")
        super()._check_options()
        for key, why in (
            ("nodes", "a job of a sweep has one host: scripts/slurm.sbatch runs one run on several"),
            ("tasks_per_node", "a job starts its ranks by itself: give devices=N"),
        ):
            if self._options.get(key, 1) != 1:
                raise UserError(f"hydra.launcher.{key}={self._options[key]}: must be 1: {why}")
        if self._options.get(RETRIES, 0):
            raise UserError(
                f"hydra.launcher.{RETRIES}={self._options[RETRIES]}: must be 0: a job whose time is over is not"
                " submitted again: give the sweep's command again with resume=auto and hydra.sweep.dir=DIR"
            )

    def _run(self, jobs: Sequence[SweepJob], configs: Sequence[DictConfig], group: str) -> None:
        submitted: list[tuple[SweepJob, Any]] = []
        # Jobs with as many GPUs are one array.
        by_gpus: dict[int | None, list[SweepJob]] = {}
        for place, (job, config) in enumerate(zip(jobs, configs, strict=True), start=1):
            announce(title_of(job, place, jobs), job)
            if job.exit_status is None:
                by_gpus.setdefault(self._gpus(config), []).append(job)
        try:
            for gpus, same in by_gpus.items():
                submitted += zip(same, self._submit(same, gpus, group), strict=True)
            self._wait(submitted)
        except KeyboardInterrupt:
            if ids := " ".join(handle.job_id for job, handle in submitted if job.exit_status is None):
                print(f"\nthe jobs stay in the queue: scancel {ids} ends them; the same command with resume=auto and")
                print(f"hydra.sweep.dir={self._config.hydra.sweep.dir}, once they have ended, runs what is missing")
            raise

    def _gpus(self, config: DictConfig) -> int | None:
        given = self._options.get("gpus_per_node")
        if given is not None or config.get("device") == "cpu":
            return given
        return config.get("devices", 1)

    def _submit(self, jobs: Sequence[SweepJob], gpus: int | None, group: str) -> list[Any]:
        """Submits `jobs`; returns submitit's jobs. Raises UserError if the scheduler takes none."""
        import submitit

        options = self._options | {"gpus_per_node": gpus}
        shared = ("cpus_per_task", "gpus_per_node", "mem_gb", "name", "stderr_to_stdout", "timeout_min")
        own = [key for key in options if key not in (*shared, FOLDER, RETRIES, "nodes", "tasks_per_node")]
        parameters = {key: options[key] for key in shared} | {f"slurm_{key}": options[key] for key in own}
        delay_s = options["signal_delay_s"] + BEFORE_SIGNAL_S
        calls = [ClusterJob(job, self._command(job), group, delay_s) for job in jobs]
        try:
            executor = submitit.AutoExecutor(folder=options[FOLDER], cluster="slurm")
            executor.update_parameters(
                nodes=1, tasks_per_node=1, **{key: value for key, value in parameters.items() if value is not None}
            )
            with _found_from_anywhere():
                handles = executor.submit_array(calls)
        except (RuntimeError, ValueError, NameError, OSError) as error:
            raise UserError(f"{OPTION}: no job was submitted: {first_line(error)}") from error
        for job, handle in zip(jobs, handles, strict=True):
            job.queued = True
            print(f"job {job.number} is slurm's job {handle.job_id}; its output: {handle.paths.stdout}")
        return handles

    def _wait(self, submitted: Sequence[tuple[SweepJob, Any]]) -> None:
        """Waits until all jobs have ended, and completes them."""
        waiting = list(submitted)
        while waiting:
            for pair in [pair for pair in waiting if pair[1].done()]:
                _complete(*pair)
                waiting.remove(pair)
                job = pair[0]
                print(f"job {job.number}: {': '.join(filter(None, job.outcome))}", flush=True)
            time.sleep(LOOK_S if waiting else 0)


def _complete(job: SweepJob, handle: Any) -> None:
    """Copies how `job` ended from its host; if that cannot be known, asks the scheduler."""
    import submitit

    try:
        ended = handle.result()
    except submitit.core.utils.UncompletedJobError:
        # Its own process did not live to tell: its host failed, say, or the queue was told to drop it.
        job.lose(f"{handle.job_id} ended as {handle.state} ({handle.paths.stderr} has more)")
        return
    job.exit_status, job.summary, job.sent = ended.exit_status, ended.summary, ended.sent
    job.timed_out, job.refused = ended.timed_out, ended.refused


@contextmanager
def _found_from_anywhere() -> Iterator[None]:
    """Makes processes that are started inside the block find this repository's modules, whatever their directory is."""
    before = os.environ.copy()
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(ROOT), before.get("PYTHONPATH"))))
    try:
        yield
    finally:
        os.environ.pop("PYTHONPATH")
        os.environ |= before
