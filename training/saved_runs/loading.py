"""Fills the model of a checkpoint without the rest of the run: of one with all weights, or with an adapter alone."""

from __future__ import annotations

from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import nn

from models.adapter_files import WEIGHTS_FILE, load_adapter_tensors
from models.weights import load_weights
from training.checkpoints.base import BaseReference
from training.config.adapter import has_adapter
from training.weights.files import ModelWeights
from training.weights.filling import fill_parameters


def load_model(model: nn.Module, checkpoint: Path, config: DictConfig, device: torch.device) -> None:
    """Copies the weights of a checkpoint into the model of `config`, wherever a mode has placed it.

    Where the run trains an adapter, the frozen base is made or loaded again before that. `device` is where initial
    values are computed. Raises ValueError if files do not fit the model, and UserError if the base is another.
    """
    if not has_adapter(config):
        load_weights(model, checkpoint)
        return
    weights = None if config.model.weights is None else ModelWeights.find(config.model.weights)
    BaseReference.of(config.seed, weights).check(checkpoint, str(checkpoint))
    fill_parameters(model, config, device, weights)
    load_adapter_tensors(model, checkpoint / WEIGHTS_FILE)
