"""Decides where a run starts: at its first step, or after a checkpoint that is complete and belongs to it."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from omegaconf import DictConfig
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from training.batches import sha256_of
from training.checkpoints.changes import refuse_changes, weights_key
from training.checkpoints.state import RunState, digest_of_all, load_tensors, read_state, restore_random_states
from training.config.declare import AUTO
from training.errors import UserError, as_user_error
from training.optim import set_step
from training.runs.checkpoint_files import (
    MANIFEST_FILE,
    RANDOM_FILE,
    STATE_FILE,
    DamagedError,
    FileRecord,
    checkpoints_in,
    followed,
    free_aside,
    read_config,
    read_manifest,
    step_of,
    verify,
)
from training.runs.files import CHECKPOINTS_FOLDER, CONFIG_FILE, SUMMARY_FILE, home_expanded
from training.runs.records import read_summary
from training.tasks.task import Task

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files were verified against its manifest."""

    folder: Path
    files: dict[str, FileRecord]
    state: RunState
    config: dict[str, Any]
    """every value as text"""

    def check_data(self, dataset, eval_sha256: str | None) -> None:
        """Raises UserError if `dataset` has other data, another last batch or other held-out batches than the run had.

        `eval_sha256` is the digest of the held-out batches, None without evaluations.
        """
        if digest_of_all(dataset) != self.state.data_sha256:
            changed = getattr(dataset, "data_changed", None) or (
                "the text has changed: dataset.files, the file of dataset.tokenizer or the release of Python is not the"
                " same, or a template of chats has written another day"
            )
        elif self.state.step and sha256_of(dataset.batch(self.state.step - 1)) != self.state.batch_sha256:
            changed = f"the dataset has changed: its batch of step {self.state.step} is not the same"
        elif None not in (eval_sha256, self.state.eval_sha256) and eval_sha256 != self.state.eval_sha256:
            changed = "the dataset has changed: its held-out batches are not the same"
        else:
            return
        raise UserError(
            f"resume={self.folder}: {changed}; restore it, or begin a new run from these weights,"
            f" {weights_key(self.config)}={self.folder}"
        )

    def check_files(self, given: str, source_sha256: str | None, task: Task) -> None:
        """Raises UserError if files that decide what a step computes have changed since the save.

        They are the config.json of model.source=`given`, and those that the task follows. Weights of the same shapes
        and batches of the same data would not show a change.
        """
        if self.state.source_sha256 != source_sha256:
            changed = f"model.source={given}: its config.json has changed"
        elif self.state.task_sha256 != task.files_sha256:
            named = " or ".join(map(str, task.files)) or "a file of the model that the task followed, now missing,"
            changed = f"{named} has changed"
        else:
            return
        raise UserError(
            f"resume={self.folder}: {changed}: restore it, or begin a new run from these weights,"
            f" {weights_key(self.config)}={self.folder}"
        )

    def check_steps(self, steps: int) -> None:
        """Raises UserError if the checkpoint is after the last of `steps` steps."""
        if self.state.step > steps:
            raise UserError(
                f"resume={self.folder}: it is at step {self.state.step}, and steps={steps}: give more steps"
            )

    def restore(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        schedule: LambdaLR,
        device: torch.device,
        averages: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> None:
        """Copies the saved state into model, optimizer, schedule, `averages` and torch's random generators.

        Raises UserError for a file that does not fit, before a tensor changes.
        """
        with as_user_error(f"resume={self.folder}: ", DamagedError):
            restore_random_states(self.folder, device)
            load_tensors(self.folder, self.files, model, optimizer, averages)
        set_step(schedule, self.state.step)
        logger.info("resuming after step %d of %s", self.state.step, self.folder)

    def set_aside_later(self, run_dir: Path) -> None:
        """Renames the checkpoints of later steps in `run_dir`: this run makes its own, and these may be damaged."""
        for folder in checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
            if step_of(folder) > self.state.step:
                aside = folder.rename(free_aside(folder))
                logger.warning(
                    "%s is later than the checkpoint that the run resumes from: renamed to %s, remove it if you do not"
                    " want it",
                    folder,
                    aside,
                )


def starting_point(config: DictConfig, run_dir: Path) -> Checkpoint | None:
    """Finds and verifies the checkpoint that `config.resume` asks for; None: the run starts at its first step.

    Raises UserError for none, a damaged or foreign one, one after the last step, and results that would be replaced.
    """
    if config.resume is None:
        _refuse_foreign(run_dir)
        return None
    if config.resume == AUTO:
        checkpoint = _newest_complete(run_dir)
        if checkpoint is None:
            _refuse_finished(run_dir)
            logger.info("resume=auto: no checkpoint in %s: the run begins at its first step", run_dir)
    else:
        checkpoint = _requested(home_expanded("resume", config.resume))
    if checkpoint is None:
        return None
    if config.resume != AUTO and not is_in(run_dir, checkpoint.folder):
        _refuse_foreign(run_dir)
    key = f"resume={checkpoint.folder}"
    refuse_changes(config, checkpoint.config, checkpoint.folder, key)
    if config.steps is not None:
        checkpoint.check_steps(config.steps)
    return checkpoint


def is_in(run_dir: Path, folder: Path) -> bool:
    """Tells whether the checkpoint `folder` is in `run_dir`, whose folder of checkpoints may link to another disk."""
    homes = (run_dir.resolve(), (run_dir / CHECKPOINTS_FOLDER).resolve())
    return any(folder.resolve().is_relative_to(home) for home in homes)


def _refuse_foreign(run_dir: Path) -> None:
    if found := checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
        raise UserError(
            f"{run_dir} has checkpoints of another run, the newest {found[0].name}: resume from it with resume=auto, or"
            " choose another place with hydra.run.dir=PATH"
        )


def _refuse_finished(run_dir: Path) -> None:
    """Raises UserError if `run_dir` has a finished run without checkpoints: a new run would replace its results."""
    if not (run_dir / SUMMARY_FILE).exists():
        return
    try:
        status = read_summary(run_dir).get("status")
    except UserError as error:
        raise UserError(
            f"resume=auto: {error}: the run may be finished, and there is no checkpoint to resume from: choose another"
            " place with hydra.run.dir=PATH, or delete that file to begin again"
        ) from None
    if status == "ok":
        raise UserError(
            f"resume=auto: {run_dir} has a finished run and no checkpoint to resume from (checkpoint.every=N saves"
            " some): choose another place with hydra.run.dir=PATH, or delete that directory to begin again"
        )


def _newest_complete(run_dir: Path) -> Checkpoint | None:
    """Opens the newest checkpoint of `run_dir` that is not damaged; None if there are no checkpoints at all."""
    found = checkpoints_in(run_dir / CHECKPOINTS_FOLDER)
    for folder in found:
        try:
            return _opened(folder)
        except DamagedError as error:
            reason = error
            logger.warning("%s; trying the checkpoint before it", error)
    if found:
        raise UserError(
            f"resume=auto: no checkpoint of {run_dir} can be used ({reason}): remove them to start from the first step"
        )
    return None


def _requested(path: Path) -> Checkpoint:
    """Opens the checkpoint in `path`, or the newest of the run in `path`."""
    folder = path = followed(path)
    if not (path / MANIFEST_FILE).exists() and step_of(path) is None:
        found = checkpoints_in(path / CHECKPOINTS_FOLDER)
        if not found:
            raise UserError(
                f"resume={path}: no checkpoint there: give a run's directory, one of its checkpoints, or auto"
            )
        folder = found[0]
    try:
        return _opened(folder)
    except DamagedError as error:
        before = _complete_before(folder)
        advice = f"the one before it is complete, resume={before}" if before else "there is no complete one before it"
        raise UserError(f"resume={path}: {error}: {advice}") from error


def _complete_before(folder: Path) -> Path | None:
    step = step_of(folder)
    for other in checkpoints_in(folder.parent):
        if step is not None and step_of(other) < step:
            try:
                return _opened(other).folder
            except DamagedError:
                continue
    return None


def _opened(folder: Path) -> Checkpoint:
    """Opens and verifies a checkpoint. Raises DamagedError naming the file and the reason."""
    files = read_manifest(folder)
    for name in (STATE_FILE, CONFIG_FILE, RANDOM_FILE):
        if name not in files:
            raise DamagedError(f"{folder / MANIFEST_FILE} lists no {name}")
    verify(folder, files)
    return Checkpoint(folder, files, read_state(folder), read_config(folder))
