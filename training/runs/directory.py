"""The directory of one run: its name, who may write its files, and one run at a time in it."""

import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from training.errors import UserError
from training.runs.bounded_files import DamagedError, read_lines
from training.runs.checkpoint_files import checkpoints_in
from training.runs.files import (
    CHECKPOINTS_FOLDER,
    CHOICES_FILE,
    CONFIG_FILE,
    LOCK_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    write_whole,
)
from training.runs.invocation import Invocation
from training.runs.records import read_summary

# The folder of train.py.
PROGRAM = Path(__file__).resolve().parents[2]
OWN_PLACE = "choose a directory of its own, "

logger = logging.getLogger(__name__)


class RunDirectory:
    """The directory of one run, which this process has locked.

    It is `taken` once this run may write its files: from the start where no earlier run has left results, so that a
    refused run leaves its reason there, else when the run is not refused.
    """

    def __init__(self, path: Path):
        self.path = path
        self.taken = not holds_results(path)

    def propose(self, config: DictConfig, invocation: Invocation) -> None:
        """Writes the configuration before it is checked, unless results of an earlier run are there."""
        if self.taken:
            # An earlier summary must not be taken for the outcome of this run.
            (self.path / SUMMARY_FILE).unlink(missing_ok=True)
            self.write_config(config, invocation)

    def take(self, config: DictConfig, invocation: Invocation) -> None:
        """Begins the run: from now on the directory's configuration and summary are this run's."""
        self.taken = True
        self.propose(config, invocation)
        # Goes to the log file only.
        logging.info("begins with %s", " ".join(invocation.overrides) or "no overrides")

    def write_config(self, config: DictConfig, invocation: Invocation) -> None:
        """Writes the configuration, and the options and overrides from which it was composed."""
        composed_from = {"choices": dict(invocation.choices), "overrides": list(invocation.overrides)}
        try:
            text = OmegaConf.to_yaml(config, resolve=True)
        except OmegaConfBaseException:
            # An interpolation of a missing key. The check that follows refuses it.
            text = OmegaConf.to_yaml(config)
        write_whole(self.path / CONFIG_FILE, text.encode())
        write_whole(self.path / CHOICES_FILE, OmegaConf.to_yaml(OmegaConf.create(composed_from)).encode())


def holds_results(run_dir: Path) -> bool:
    """Tells whether an earlier run or plan left more in `run_dir` than the reason of its failure."""
    if has_records(run_dir) or checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
        return True
    try:
        return (run_dir / SUMMARY_FILE).exists() and not read_summary(run_dir).keys() <= {"status", "reason"}
    except UserError:
        # A damaged summary may have held results.
        return True


def refuse_records(run_dir: Path) -> None:
    """Raises UserError if another run has logged steps in `run_dir`: a new run would mix its records with them."""
    if has_records(run_dir):
        raise UserError(
            f"{run_dir} has the {METRICS_FILE} of another run: choose another place with hydra.run.dir=PATH, or delete"
            " that directory to start again in it"
        )


def has_records(run_dir: Path) -> bool:
    """Tells whether a run has logged steps in `run_dir`."""
    try:
        # A line that a killed run did not finish is not a record.
        return next(read_lines(run_dir / METRICS_FILE), b"").endswith(b"\n")
    except DamagedError:
        return False


def refuse_program_folder(path: Path, own: str) -> None:
    """Raises UserError if `path`, a folder to write to, is this program's; `own` is the override for another folder."""
    if path.resolve() == PROGRAM:
        raise UserError(f"{path}: the folder of this program: {OWN_PLACE}{own}")


@contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Locks the directory for this process; the system releases the lock however the process ends.

    The lock file stays: if it were removed, two waiting processes could each lock a different file of that name.
    Raises UserError where that fails, for the folder of this program, and for a configuration that no run wrote.
    """
    own = "hydra.run.dir=runs/NAME"
    refuse_program_folder(run_dir, own)
    path, written = run_dir / LOCK_FILE, run_dir / CONFIG_FILE
    if os.path.lexists(written) and not (os.path.lexists(path) or os.path.lexists(run_dir / CHOICES_FILE)):
        raise UserError(f"{written}: not written by a run, which would replace it: {OWN_PLACE}{own}")
    # O_NOFOLLOW: a link made since the check would let the run truncate another file.
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise UserError(
            f"{path}: cannot be written ({error.strerror}): choose a directory that can be, hydra.run.dir=PATH"
        ) from error
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
        # The process number is for the message above. A full disk is reported later, by the run.
        with suppress(OSError):
            file.truncate(0)
            file.write(f"{os.getpid()}\n".encode())
        yield


def register_fresh() -> None:
    """Registers `${fresh:PATH}` with OmegaConf: the path of a new directory, the same in copies of a configuration."""
    OmegaConf.register_new_resolver("fresh", fresh_directory, use_cache=True, replace=True)


def fresh_directory(path: str) -> str:
    """Makes the directory `path`, or `path-2` and so on if it exists; returns its path, or `path` if that fails."""
    for number in count(1):
        candidate = Path(path if number == 1 else f"{path}-{number}")
        try:
            candidate.mkdir(parents=True)
        except FileExistsError:
            continue
        except OSError:
            return path
        return str(candidate)
