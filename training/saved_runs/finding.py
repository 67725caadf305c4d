"""A run that was saved: its directory, its configuration, and the checkpoint whose weights a program loads."""

from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from models.adapter_files import WEIGHTS_FILE, load_adapter_tensors
from models.safetensors_files import read_into
from models.weights import load_weights
from training.checkpoints.base import BaseReference
from training.checkpoints.state import read_state
from training.config import schema
from training.config.adapter import has_adapter
from training.config.declare import AUTO
from training.config.validation import check
from training.errors import UserError, as_user_error
from training.runs.checkpoint_files import (
    MANIFEST_FILE,
    MODEL_FILES,
    DamagedError,
    checkpoints_in,
    followed,
    read_config,
    read_manifest,
    step_of,
    verify,
)
from training.runs.files import CHECKPOINTS_FOLDER, home_expanded
from training.runs.invocation import Invocation
from training.runs.repeat import overrides_of
from training.sweeps import launcher
from training.weights.averages import averages_in, trained_by_name
from training.weights.files import ModelWeights
from training.weights.filling import fill_parameters
from training.weights.source import source_digest


def found(given: str) -> tuple[Path, Path | None]:
    """Returns the directory of a run, and the checkpoint if `given` is the folder of one, else None.

    Raises UserError if there is no such directory.
    """
    path = home_expanded("RUN", given).absolute()
    if not path.is_dir():
        raise UserError(f"{given}: no such directory: give the directory of a run, or one of its checkpoints")
    path = followed(path)
    if (path / MANIFEST_FILE).exists() or step_of(path) is not None:
        return path.parent.parent, path
    return path, None


def newest_checkpoint(run_dir: Path) -> Path:
    """Returns the newest checkpoint of a run. Raises UserError if there is none."""
    if checkpoints := checkpoints_in(run_dir / CHECKPOINTS_FOLDER):
        return checkpoints[0]
    raise UserError(f"{run_dir}: the run has no checkpoint: train with checkpoint.every=N")


def configuration(run_dir: Path, overrides: list[str]) -> tuple[DictConfig, Invocation]:
    """Composes and checks the configuration of the run in `run_dir`, changed by `overrides`."""
    schema.register()
    launcher.register_launcher()
    config, invocation = Invocation.composed(overrides_of(run_dir, str(run_dir), overrides), run_dir)
    check(config)
    # What is read here computes whole rows.
    config.parallel.sequence = 1
    return config, invocation


def take_tokenizer(config: DictConfig, checkpoint: Path) -> None:
    """Replaces dataset.tokenizer=auto in `config` by the run's tokenizer. Raises UserError for a damaged checkpoint."""
    if config.dataset.get("tokenizer") != AUTO:
        return
    with as_user_error("", DamagedError, after=": give another checkpoint"):
        dataset = read_config(checkpoint).get("dataset")
    if isinstance(dataset, dict) and "tokenizer" in dataset:
        # Values are read as texts.
        config.dataset.tokenizer = None if dataset["tokenizer"] == "null" else dataset["tokenizer"]


def refuse_damage(checkpoint: Path, config: DictConfig) -> None:
    """Raises UserError if the checkpoint's weights, or the config.json of model.source, have changed since the save."""
    with as_user_error("", DamagedError, after=": give another checkpoint"):
        files = read_manifest(checkpoint)
        verify(checkpoint, {name: record for name, record in files.items() if name.startswith(MODEL_FILES)})
        saved = read_state(checkpoint).source_sha256
    if saved not in (None, source_digest(config.model)):
        raise UserError(
            f"{checkpoint}: model.source={config.model.source}: its config.json is not that of the run: restore it"
        )


def load_model(model: nn.Module, checkpoint: Path, config: DictConfig, device: torch.device) -> None:
    """Copies the weights of a checkpoint, or with `ema` their averages, into the model of `config`.

    The checkpoint of an adapter has no base: it is loaded or initialised again, by computations on `device`. Raises
    ValueError for files that do not fit the model, and UserError if the base is not that of the checkpoint.
    """
    if has_adapter(config):
        weights = None if config.model.weights is None else ModelWeights.find(config.model.weights)
        BaseReference.of(config.seed, weights).check(checkpoint, str(checkpoint))
        fill_parameters(model, config, device, weights)
        load_adapter_tensors(model, checkpoint / WEIGHTS_FILE)
    else:
        load_weights(model, checkpoint)
    if averages := averages_in(checkpoint, config.ema):
        read_into(trained_by_name(model), averages)
