"""The parts of a job that need no device: the model on the meta device, its mode, its blocks."""

from __future__ import annotations

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload.modes.mode import Mode
from offload.runtime.blocks import find_blocks
from offload.weights.footprint import Footprint
from training.config.construct import keys_under, make_mode
from training.config.schema import OnNonfinite, Precision
from training.errors import UserError

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}

# The gradients of what is updated on the device stay there with its states, and the allocator needs room to turn.
STATES_OF_SPARE = 0.8


def build_model(config: DictConfig, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device: shapes and names, no memory.

    Raises UserError where it has a tensor of more bytes than can be counted.
    """
    settings = OmegaConf.to_container(config.model, resolve=True)
    settings.pop("weights")
    try:
        with torch.device("meta"):
            return instantiate(settings).to(dtype)
    except InstantiationException as error:
        if "overflow" not in str(error.__cause__).lower():
            raise
        raise UserError("model: its sizes are beyond any memory: take smaller ones") from error


def build_mode(config: DictConfig, model: nn.Module) -> tuple[Mode, Footprint]:
    """The offload mode and its plan for `model`. Raises UserError for a knob that does not fit the model."""
    mode = make_mode(config.offload)
    with keys_under("offload"):
        return mode, mode.footprint(model, recompute=recomputes(config))


def recomputes(config: DictConfig) -> bool:
    """Whether the configuration asks for recomputed blocks."""
    return HydraConfig.get().runtime.choices["recompute"] != "none"


def recomputed_blocks(config: DictConfig, model: nn.Module, mode) -> list[nn.Module]:
    """The blocks whose activations are recomputed, none where `mode` does that itself.

    Raises UserError where the path leads to none.
    """
    if not recomputes(config) or mode.recomputes:
        return []
    try:
        return [block for _, block in find_blocks(model, config.recompute.blocks, key="recompute.blocks")]
    except ValueError as error:
        raise UserError(str(error)) from error


def state_dtype(config: DictConfig) -> str:
    """The dtype of the optimizer's moments, "fp32" where it knows no other."""
    return str(config.optimizer.get("state_dtype", "fp32"))


def updates_early(config: DictConfig) -> bool:
    """Whether updates may begin inside backward.

    What must be known of all gradients first, their norm or that they are finite, is known after it.
    """
    return config.clip_norm is None and config.on_nonfinite == OnNonfinite.stop
