"""Where a run begins: at its first step, or behind a checkpoint that is whole and is this run's."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from training.checkpoints.changes import read_config, refuse_changes
from training.checkpoints.layout import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    MANIFEST_FILE,
    RANDOM_FILE,
    STATE_FILE,
    checkpoints_in,
    free_aside,
    step_of,
)
from training.checkpoints.manifest import DamagedError, FileRecord, read_manifest, verify
from training.checkpoints.state import RunState, digest_of, digest_of_all, read_state, restore_random_states
from training.checkpoints.tensors import load_tensors
from training.errors import UserError
from training.optim import go_to
from training.runs.paths import home_expanded

logger = logging.getLogger(__name__)

AUTO = "auto"


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint whose files are all what was written."""

    folder: Path
    files: dict[str, FileRecord]
    state: RunState
    config: dict[str, Any]
    """as texts"""

    def check_data(self, dataset) -> None:
        """Raises UserError unless `dataset` has the tokens that it had, or gives the last step's batch as it did."""
        if digest_of_all(dataset) != self.state.tokens_sha256:
            changed = (
                "the text is not what it was: dataset.files, the file of dataset.tokenizer or the release of Python"
                " has changed"
            )
        elif self.state.step and digest_of(dataset.batch(self.state.step - 1)) != self.state.batch_sha256:
            changed = f"the dataset does not give the batch of step {self.state.step} that it gave: it has changed"
        else:
            return
        raise UserError(
            f"resume={self.folder}: {changed}; bring it back, or begin a new run from these weights,"
            f" model.weights={self.folder}"
        )

    def restore(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: LambdaLR, device: torch.device
    ) -> None:
        """Writes the run's state into what has been built, wherever that lives.

        Raises UserError naming the file that does not fit, before the model is touched.
        """
        try:
            restore_random_states(self.folder, device)
            load_tensors(self.folder, self.files, model, optimizer)
        except DamagedError as error:
            raise UserError(f"resume={self.folder}: {error}") from error
        go_to(schedule, self.state.step)
        logger.info("goes on after step %d of %s", self.state.step, self.folder)

    def set_aside_later(self, run_dir: Path) -> None:
        """Renames what `run_dir` has of later steps: this run makes them anew, and they may be damaged."""
        for folder in checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
            if step_of(folder) > self.state.step:
                aside = folder.rename(free_aside(folder))
                logger.warning("%s is not gone on from: renamed to %s, remove it if you do not want it", folder, aside)


def starting_point(config: DictConfig, run_dir: Path) -> Checkpoint | None:
    """The checkpoint that `config.resume` asks for, read and checked from end to end; None: the run begins anew.

    Raises UserError in one line: there is none, it is damaged (then naming the one before), it is beyond the last
    step, or of another configuration; also where a new run would mix its checkpoints with those that are there.
    """
    if config.resume is None:
        _refuse_foreign(run_dir)
        return None
    checkpoint = _newest_whole(run_dir) if config.resume == AUTO else _asked_for(home_expanded("resume", config.resume))
    if checkpoint is None:
        return None
    if config.resume != AUTO and not is_in(run_dir, checkpoint.folder):
        _refuse_foreign(run_dir)
    key = f"resume={checkpoint.folder}"
    refuse_changes(config, checkpoint.config, checkpoint.folder, key)
    if checkpoint.state.step > config.steps:
        raise UserError(f"{key}: it is at step {checkpoint.state.step}, and steps={config.steps}: give more steps")
    return checkpoint


def is_in(run_dir: Path, folder: Path) -> bool:
    """Whether the checkpoint `folder` is one of `run_dir`, whose folder of checkpoints may link to another disk."""
    homes = (run_dir.resolve(), (run_dir / CHECKPOINTS_FOLDER).resolve())
    return any(folder.resolve().is_relative_to(home) for home in homes)


def _refuse_foreign(run_dir: Path) -> None:
    if found := checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
        raise UserError(
            f"{run_dir} has checkpoints of another run, the newest {found[0].name}: go on from it with resume=auto, or"
            " choose another place with hydra.run.dir=PATH"
        )


def _newest_whole(run_dir: Path) -> Checkpoint | None:
    """The newest checkpoint of this directory that is whole; None where there are none at all."""
    found = checkpoints_in(run_dir / CHECKPOINTS_FOLDER)
    for folder in found:
        try:
            return _opened(folder)
        except DamagedError as error:
            reason = error
            logger.warning("%s; trying the checkpoint before it", error)
    if found:
        raise UserError(f"resume=auto: no checkpoint of {run_dir} can be used ({reason}): remove them to begin anew")
    return None


def _asked_for(path: Path) -> Checkpoint:
    """The checkpoint in `path`, or the newest of the run in `path`."""
    folder = path
    if not (path / MANIFEST_FILE).exists() and step_of(path) is None:
        found = checkpoints_in(path / CHECKPOINTS_FOLDER)
        if not found:
            raise UserError(f"resume={path}: no checkpoint there: give a run's directory, or one of its checkpoints")
        folder = found[0]
    try:
        return _opened(folder)
    except DamagedError as error:
        before = _whole_before(folder)
        advice = f"the one before it is whole, resume={before}" if before else "there is none before it that is whole"
        raise UserError(f"resume={path}: {error}: {advice}") from error


def _whole_before(folder: Path) -> Path | None:
    step = step_of(folder)
    for other in checkpoints_in(folder.parent):
        if step is not None and step_of(other) < step:
            try:
                return _opened(other).folder
            except DamagedError:
                continue
    return None


def _opened(folder: Path) -> Checkpoint:
    """Raises DamagedError naming the file and the reason."""
    files = read_manifest(folder)
    for name in (STATE_FILE, CONFIG_FILE, RANDOM_FILE):
        if name not in files:
            raise DamagedError(f"{folder / MANIFEST_FILE} lists no {name}")
    verify(folder, files)
    return Checkpoint(folder, files, read_state(folder), read_config(folder))
