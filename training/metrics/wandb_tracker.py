"""Tracking in wandb that can fail in any way without harming the run.

One thread owns wandb: only this thread imports it, starts it, logs and finishes. The training thread passes records to
it, and waits for it only at the start and at the end, each time for a bounded time. Every error of wandb, and every
hang, ends in one warning; the files of the run's directory do not depend on it.
"""

import logging
import os
import queue
import secrets
import shlex
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import psutil
from omegaconf import OmegaConf

from training.errors import UserError
from training.metrics.run_names import SWEEP_GROUP_VARIABLE
from training.runs.failures import explain
from training.runs.files import METRICS_FILE, WANDB_FOLDER

if TYPE_CHECKING:
    import wandb

logger = logging.getLogger(__name__)

MODES = ("auto", "online", "offline", "disabled")

_SETTINGS = {
    "silent": True,
    "console": "off",
    "init_timeout": 10.0,
    "finish_timeout": 30.0,
    "finish_timeout_raises": True,
    # Otherwise a run left open would be returned in place of a new one.
    "reinit": "create_new",
    # Files that are kept with the run stay in it when its directory is moved.
    "symlink": False,
}
# Metrics that are zero in every step of many runs; in charts there are those of runs that have them.
_OFTEN_ZERO = ("transfer/", "optimizer/", "memory/", "train/skipped_steps")
# Longest waits for the wandb thread. wandb's own limits above are shorter, so that it can report what went wrong; these
# limits end the wait for a wandb that does not answer.
_START_LIMIT_S = 20.0
_FINISH_LIMIT_S = 40.0
_KILLED_LIMIT_S = 2.0
# Records that may wait for wandb: far more than wait while it works, and little memory if it hangs.
_QUEUE_LENGTH = 10_000

_Task = Callable[["wandb.Run"], object]


class Tracker:
    """A run in wandb, whose files are in the folder `wandb` of `run_dir`, or of WANDB_DIR; one at a time in a process.

    It raises nothing for errors in wandb, and asks nothing on the terminal. Its group is that of the sweep, or
    WANDB_RUN_GROUP; its team is WANDB_ENTITY.

    Args:
        mode: auto is what WANDB_MODE or the command `wandb offline` chose, else online with an API key and offline
            without; disabled does not import wandb.
        system: whether a process samples the load of the machine.
        resume_id: the id of the wandb run that this one continues.

    Raises UserError for an unknown `mode`.
    """

    def __init__(
        self,
        mode: str,
        *,
        run_dir: Path,
        config: Mapping[str, Any],
        project: str | None = None,
        tags: Sequence[str] = (),
        name: str | None = None,
        system: bool = False,
        resume_id: str | None = None,
    ):
        if mode not in MODES:
            raise UserError(f"tracking.mode={mode}: unknown mode; choose one of {', '.join(MODES)}")
        _unset_empty_variables()
        self._mode, self._run_dir = mode, run_dir
        self._parent = Path(os.environ.get("WANDB_DIR", run_dir))
        # Without it there is no sampling process beside the measured one.
        self._own_settings = {"x_disable_stats": not system}
        self._nonzero: set[str] = set()
        self.id: str | None = resume_id or secrets.token_hex(4)
        """The id of the run in wandb; None if there is no such run."""
        self._init_arguments = {
            "id": self.id,
            "resume": "allow" if resume_id else None,
            "project": project,
            "job_type": "train",
            "group": os.environ.get(SWEEP_GROUP_VARIABLE),
            "tags": list(tags),
            "name": name,
            "config": plain(config),
        }
        self._sync_dir: Path | None = None
        self._samples: wandb.Table | None = None
        self._tasks: queue.Queue[_Task | None] = queue.Queue(_QUEUE_LENGTH)
        self._started = threading.Event()
        self._closed = False
        self._closing = threading.Lock()
        self._thread: threading.Thread | None = None
        if mode == "disabled" or (mode == "auto" and os.environ.get("WANDB_MODE") == "disabled"):
            self.id = resume_id
        else:
            self._start_thread(resume_id)

    def _start_thread(self, resume_id: str | None) -> None:
        """Starts the thread that works for wandb; without it there is no run in wandb."""
        thread = threading.Thread(target=self._work, name="wandb", daemon=True)
        try:
            thread.start()
        except RuntimeError as error:
            self.id = resume_id
            self._give_up(_one_line(error))
            return
        self._thread = thread
        if not self._started.wait(_START_LIMIT_S):
            self._give_up(f"wandb did not start within {_START_LIMIT_S:.0f} s")
            _kill_service()

    def log(self, record: Mapping[str, Any], step: int) -> None:
        """Passes `record` to wandb for `step`, without metrics that were zero in all steps so far; returns at once."""
        self._nonzero |= {key for key, value in record.items() if value or not key.startswith(_OFTEN_ZERO)}
        values = {key: value for key, value in record.items() if key in self._nonzero}
        self._submit(lambda run: run.log(values, step=step, commit=True))

    def log_files(self, pictures: Mapping[str, Path], files: Sequence[Path], step: int) -> None:
        """Passes pictures by key, and files in the run's directory, to wandb; returns at once.

        They must not change afterwards, because wandb reads them later.
        """
        paths = dict(pictures)

        def log(run: "wandb.Run") -> None:
            import wandb

            shown = {key: wandb.Image(str(path)) for key, path in paths.items()}
            # Not committed, because the metrics of this step may follow.
            run.log({"train/step": step, **shown}, step=step, commit=False)
            for path in files:
                run.save(path, base_path=self._run_dir, policy="now", glob=False)

        self._submit(log)

    def log_sample(self, sample: Mapping[str, str | Path], step: int) -> None:
        """Passes a sample, texts and pictures, to wandb as the next row of the table `samples`; returns at once."""

        def log(run: "wandb.Run") -> None:
            import wandb

            row = {"step": step} | {
                name: wandb.Image(str(value)) if isinstance(value, Path) else value for name, value in sample.items()
            }
            if self._samples is None:
                # Each row is stored once, and wandb shows all of them.
                self._samples = wandb.Table(columns=list(row), log_mode="INCREMENTAL")
            self._samples.add_data(*row.values())
            # Not committed, because the metrics of this step may follow.
            run.log({"train/step": step, "samples": self._samples}, step=step, commit=False)

        self._submit(log)

    def fail(self, error: BaseException) -> None:
        """Ends the wandb run as failed, with the status and reason that summary.json has for `error`."""
        failure = explain(error)
        self.finish({"status": failure.status, "reason": failure.reason}, exit_code=1)

    @contextmanager
    def failing_with(self) -> Iterator[None]:
        """Surrounds a part of a run; an error in it ends the wandb run as failed."""
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def finish(self, summary: Mapping[str, Any], exit_code: int = 0) -> None:
        """Ends the wandb run with `summary`, and waits for the upload, at most 40 s. A second call does nothing."""
        if self._thread is None:
            return
        values = dict(summary)
        self._submit(lambda run: run.summary.update(values))
        self._submit(lambda run: run.finish(exit_code=exit_code))
        self._submit(None)
        self._thread.join(_KILLED_LIMIT_S if self._closed else _FINISH_LIMIT_S)
        if self._thread.is_alive():
            self._give_up(f"wandb did not finish within {_FINISH_LIMIT_S:.0f} s")
            _kill_service()
            self._thread.join(_KILLED_LIMIT_S)
        self._thread = None

    def _submit(self, task: _Task | None) -> None:
        if self._thread is None or self._closed:
            return
        try:
            self._tasks.put_nowait(task)
        except queue.Full:
            self._give_up("wandb does not answer")
            _kill_service()

    def _give_up(self, problem: str) -> None:
        with self._closing:
            if self._closed:
                return
            self._closed = True
        rescue = f"; upload what wandb has: {_sync_command(self._sync_dir)}" if self._sync_dir else ""
        logger.warning(
            "tracking stopped: %s; the run is unharmed, %s has every record%s", problem, METRICS_FILE, rescue
        )

    # The methods below run on the wandb thread.

    def _work(self) -> None:
        try:
            if run := self._start():
                self._started.set()
                while task := self._tasks.get():
                    task(run)
        except Exception as error:
            # wandb raises errors of its own, of its dependencies and of the socket; none of them may stop a run.
            self._give_up(_one_line(error))
        finally:
            _tear_down(exit_code=int(self._closed))
            self._closed = True
            self._started.set()

    def _start(self) -> "wandb.Run | None":
        wandb_dir = self._parent / WANDB_FOLDER
        # The service process reads these variables from the environment.
        os.environ["WANDB_CACHE_DIR"] = str(wandb_dir / "cache")
        os.environ["WANDB_DATA_DIR"] = str(wandb_dir / "data")
        # A service inherited from a parent process would end with the parent.
        os.environ.pop("WANDB_SERVICE", None)
        import wandb

        if self._closed:  # the import took longer than the run waits
            return None
        chosen = {} if self._mode == "auto" else {"mode": self._mode}
        mode = wandb.setup(wandb.Settings(**_SETTINGS, **self._own_settings, **chosen)).settings.mode
        if mode == "disabled" or self._closed:
            return None
        run, cause, level = None, "offline as asked", logging.INFO
        if mode not in ("offline", "dryrun"):
            run, cause, level = self._init_online(wandb)
        if run is None:
            run = self._init(wandb, mode="offline")
        self._sync_dir = Path(run.settings.sync_dir)
        where = f"upload it: {_sync_command(self._sync_dir)}" if run.offline else f"at {run.url}"
        logger.log(level, "tracking: wandb run %s; %s", cause, where)
        run.define_metric("train/step")
        run.define_metric("*", step_metric="train/step")
        return run

    def _init_online(self, wandb: ModuleType) -> tuple["wandb.Run | None", str, int]:
        """Starts the run online; returns the run, or None without key or network, with a log message and its level."""
        # Folders of the run that this one continues are kept.
        before = set((self._parent / WANDB_FOLDER).glob("run-*"))
        try:
            if wandb.login(prompt=False, verify=False):
                return self._init(wandb, mode="online"), "online", logging.INFO
        except wandb.Error as error:
            # The service still holds the run's id, which the offline run needs.
            _kill_service()
            _tear_down(exit_code=1)
            # `wandb sync` would upload the folders of this attempt as an empty run.
            for abandoned in set((self._parent / WANDB_FOLDER).glob(f"run-*-{self.id}")) - before:
                shutil.rmtree(abandoned, ignore_errors=True)
            return None, f"offline, because online fails ({_one_line(error)})", logging.WARNING
        asked = self._mode == "online" or "WANDB_MODE" in os.environ
        level = logging.WARNING if asked else logging.INFO
        return None, "offline, because no API key is set (`wandb login` sets one)", level

    def _init(self, wandb: ModuleType, **arguments: str) -> "wandb.Run":
        return wandb.init(
            dir=self._parent, settings=_SETTINGS | self._own_settings, **self._init_arguments, **arguments
        )


def plain(config: Any) -> Any:
    """Converts `config` to nested dicts and lists of strings, numbers, booleans and None, interpolations resolved."""
    if OmegaConf.is_config(config):
        config = OmegaConf.to_container(config, resolve=True, enum_to_str=True)
    if isinstance(config, Mapping):
        return {str(key): plain(value) for key, value in config.items()}
    if isinstance(config, list | tuple):
        return [plain(value) for value in config]
    return config if config is None or isinstance(config, str | int | float) else str(config)


def _unset_empty_variables() -> None:
    """Removes the settings of wandb that are empty, as a job script may leave them: wandb refuses them."""
    for name in [name for name, value in os.environ.items() if name.startswith("WANDB_") and not value.strip()]:
        del os.environ[name]


def _tear_down(exit_code: int) -> None:
    """Ends the service, so that the next run starts its own; runs that are still open get `exit_code`."""
    wandb = sys.modules.get("wandb")
    if wandb is None:
        return
    # The connection raises if the service is dead, and wandb calls sys.exit if it ended badly.
    with suppress(Exception, SystemExit):
        wandb.teardown(exit_code)


def _kill_service() -> None:
    """Kills the service, so that every call that waits for it raises, wandb's exit handler included."""
    for child in psutil.Process().children():
        with suppress(psutil.Error):
            if child.name().startswith("wandb-core"):
                child.kill()


def _sync_command(sync_dir: Path) -> str:
    here = Path.cwd()
    path = sync_dir.relative_to(here) if sync_dir.is_relative_to(here) else sync_dir
    return f"wandb sync {shlex.quote(str(path))}"


def _one_line(error: Exception) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line[:200]}"
