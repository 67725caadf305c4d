"""The directory of one run: whose its files are, and one run at a time in it."""

from __future__ import annotations

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.checkpoints.layout import CHECKPOINTS_FOLDER, checkpoints_in
from training.errors import UserError
from training.metrics.files import METRICS_FILE, SUMMARY_FILE, read_summary
from training.runs.files import CHOICES_FILE, CONFIG_FILE, LOCK_FILE, refuse_links


class RunDirectory:
    """The directory of one run, which this process has locked.

    Attributes:
        taken: whether its files are this run's to write. A directory without figures is from the start, so that a run
            which is refused says there why; else it is from when nothing of the run is refused any more.
    """

    def __init__(self, path: Path):
        self.path = path
        self.taken = not holds_figures(path)

    def propose(self, config: DictConfig) -> None:
        """Before anything is checked: writes down what is asked for, where nothing is lost by that."""
        if self.taken:
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
            self.describe(config)

    def take(self, config: DictConfig) -> None:
        """The run begins: what an earlier one left must not be taken for the outcome of this one."""
        self.taken = True
        (self.path / SUMMARY_FILE).unlink(missing_ok=True)
        self.describe(config)
        # To the file alone.
        logging.info("begins with %s", " ".join(HydraConfig.get().overrides.task) or "no overrides")

    def describe(self, config: DictConfig) -> None:
        """Writes the configuration, and beside it the options and overrides that it was composed of."""
        hydra = HydraConfig.get()
        made_of = {"choices": hydra.runtime.choices, "overrides": hydra.overrides.task}
        try:
            OmegaConf.save(config, self.path / CONFIG_FILE, resolve=True)
        except OmegaConfBaseException:
            # A reference that leads nowhere, which is refused next.
            OmegaConf.save(config, self.path / CONFIG_FILE)
        OmegaConf.save(OmegaConf.create(made_of), self.path / CHOICES_FILE)


def holds_figures(run_dir: Path) -> bool:
    """Whether a run or a plan left more there than why it failed."""
    if _has_records(run_dir) or checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
        return True
    if not (run_dir / SUMMARY_FILE).exists():
        return False
    try:
        return not read_summary(run_dir).keys() <= {"status", "reason"}
    except UserError:
        # Damaged, so nobody can tell what it said.
        return True


def refuse_records(run_dir: Path) -> None:
    """Raises UserError where another run has logged steps: those of a run that begins anew would mix with them."""
    if _has_records(run_dir):
        raise UserError(
            f"{run_dir} has the {METRICS_FILE} of another run: choose another place with hydra.run.dir=PATH, or delete"
            " that directory to begin anew in it"
        )


def _has_records(run_dir: Path) -> bool:
    path = run_dir / METRICS_FILE
    if not path.is_file():
        return False
    with open(path, "rb") as file:
        # A line that a killed run did not finish is no record.
        return file.readline().endswith(b"\n")


logger = logging.getLogger(__name__)


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Holds the directory for this process; the system releases it however the process ends.

    The file stays: were it removed, two that wait for it could each hold another file of that name. Raises UserError
    where another process holds the directory, or a file that a run writes there is a link.
    """
    refuse_links(run_dir)
    path = run_dir / LOCK_FILE
    # A link made since would have another file cut to nothing.
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    with open(descriptor, "a+b", buffering=0) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            holder = file.read(20).decode(errors="replace").strip()
            raise UserError(
                f"{run_dir}: another run writes to this directory{f' (process {holder})' if holder else ''}: wait until"
                " it has ended, or choose another place with hydra.run.dir=PATH"
            ) from None
        except OSError as error:
            logger.warning("%s: cannot be locked (%s), so two runs at once would go unnoticed", run_dir, error.strerror)
        # For the message above; a full disk is for the run to report.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield
