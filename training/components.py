"""The components of a run, made once from its configuration: read by the plan, by `build` and by the loop."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload.modes.mode import Mode
from offload.optimizer.adamw import HostAdamW
from offload.runtime import registry
from offload.runtime.blocks import find_blocks
from offload.runtime.registry import Streams
from offload.weights.footprint import Footprint
from offload.weights.partition import cut
from training.config.construct import keys_under, make_mode
from training.config.schema import OnNonfinite, Precision, RecomputeBlocks
from training.errors import UserError
from training.runs.invocation import Invocation

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}

# The share of spare device memory that optimizer states may take: their gradients stay there too, and the allocator
# needs room.
STATES_OF_SPARE = 0.8


@dataclass(frozen=True)
class Components:
    """The objects that a configuration describes, before anything is allocated.

    Attributes:
        device: where the run computes; a plan for another machine asks `Machine` instead.
        model: on the meta device (shapes and names, no memory) until the mode attaches.
        footprint: the bytes that the mode will hold and move.
        recomputed_blocks: the blocks whose activations backward computes again; empty if the mode itself does that.
        optimizer_class: the class of the optimizer, which is made after the mode has attached.
    """

    config: DictConfig
    invocation: Invocation
    device: torch.device
    dtype: torch.dtype
    model: nn.Module
    mode: Mode
    footprint: Footprint
    recomputed_blocks: tuple[nn.Module, ...]
    optimizer_class: type[HostAdamW]

    @classmethod
    def of(cls, config: DictConfig, invocation: Invocation, device: torch.device) -> Components:
        """Makes the components. Raises UserError for a model, a mode or a knob that cannot be had."""
        dtype = DTYPES[config.precision]
        model = _model(config, dtype)
        mode, footprint = _mode(config, model)
        blocks = _recomputed_blocks(config, model, mode)
        optimizer_class = get_class(config.optimizer._target_)
        return cls(config, invocation, device, dtype, model, mode, footprint, blocks, optimizer_class)

    @property
    def updates_overlap(self) -> bool:
        """True if the optimizer can update beside the step, as the mode asks it to."""
        return self.optimizer_class.overlaps

    @property
    def updates_begin_early(self) -> bool:
        """True if an update may begin inside backward.

        Clipping needs the norm of all gradients first, and `on_nonfinite=skip` needs to know that all are finite.
        """
        return self.config.clip_norm is None and self.config.on_nonfinite == OnNonfinite.stop

    @property
    def state_dtype(self) -> str:
        """The dtype of the optimizer's moments; "fp32" for an optimizer without that knob."""
        return str(self.config.optimizer.get("state_dtype", "fp32"))


def recomputes(config: DictConfig) -> bool:
    """Tells whether the configuration asks for recomputed blocks."""
    return issubclass(OmegaConf.get_type(config.recompute), RecomputeBlocks)


@contextmanager
def left_as_found(model: nn.Module) -> Iterator[None]:
    """Puts the parameters and buffers of `model` back afterwards, the same objects, without gradients.

    Attaching a mode to a meta model replaces them, and detaching does not bring the old ones back. Tied weights stay
    tied.
    """
    before = cut(model, []).resident
    try:
        yield
    finally:
        for tensor, places in before:
            tensor.grad = None
            for place in places:
                place.assign(tensor)


@contextmanager
def acquired(device: torch.device) -> Iterator[Streams]:
    """Acquires the streams of `device`, and releases them afterwards, whatever happens."""
    streams = registry.acquire(device)
    try:
        yield streams
    finally:
        registry.release(streams)


def _model(config: DictConfig, dtype: torch.dtype) -> nn.Module:
    """Makes the model on the meta device. Raises UserError if the bytes of a tensor overflow an integer."""
    arguments = OmegaConf.to_container(config.model, resolve=True)
    arguments.pop("weights")
    try:
        with torch.device("meta"):
            return instantiate(arguments).to(dtype).train()
    except InstantiationException as error:
        if "overflow" not in str(error.__cause__).lower():
            raise
        raise UserError("model: its sizes are beyond any memory: take smaller ones") from error


def _mode(config: DictConfig, model: nn.Module) -> tuple[Mode, Footprint]:
    """Makes the offload mode and its footprint on `model`. Raises UserError for a knob that does not fit the model."""
    mode = make_mode(config.offload)
    with keys_under("offload"):
        return mode, mode.footprint(model, recompute=recomputes(config))


def _recomputed_blocks(config: DictConfig, model: nn.Module, mode: Mode) -> tuple[nn.Module, ...]:
    """Finds the blocks to recompute. Raises UserError if `recompute.blocks` is not the path of a list of blocks."""
    if not recomputes(config) or mode.recomputes:
        return ()
    try:
        return tuple(block for _, block in find_blocks(model, config.recompute.blocks, key="recompute.blocks"))
    except ValueError as error:
        raise UserError(str(error)) from error
