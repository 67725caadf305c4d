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

from offload import Footprint, HostAdamW, Mode, Streams, WeightMode, acquire, find_blocks, parse_bytes, release
from offload.planning import StateFormat
from training.adapters import add_adapter
from training.config.auto import AUTO
from training.config.construct import keys_under, make_mode, make_task
from training.config.no_adapter import has_adapter
from training.config.parallel import Homes
from training.config.schema import OnNonfinite, Precision, RecomputeBlocks
from training.errors import UserError
from training.mapped_weights import map_weights
from training.model_source import local_source, weights_of_source
from training.quantising import quantise_blocks
from training.runs.invocation import Invocation
from training.tasks.task import Task

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}

WEIGHTS = "model.weights"
# Keys whose auto follows from the configuration and the device.
SETTLED_HERE = ("precision", "microbatches", WEIGHTS)
# The states of an optimizer without knobs for them.
WIDEST = ("fp32", "fp32", "nearest")
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
        settled: the keys whose value in the configuration was auto.
    """

    config: DictConfig
    invocation: Invocation
    device: torch.device
    dtype: torch.dtype
    task: Task
    model: nn.Module
    mode: Mode
    footprint: Footprint
    recomputed_blocks: tuple[nn.Module, ...]
    optimizer_class: type[HostAdamW]
    settled: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        config: DictConfig,
        invocation: Invocation,
        device: torch.device,
        on_gpu: bool | None = None,
        model: nn.Module | None = None,
    ) -> Components:
        """Makes the components, and settles the keys of SETTLED_HERE that are auto in `config`.

        `on_gpu`: whether a plan is for a GPU, if that differs from `device`. `model` spares making the model again:
        that of a configuration with the same `model` and `precision`, still on the meta device. Raises UserError for a
        model, a mode or a knob that cannot be had.
        """
        task = make_task(config.task)
        settled = frozenset(key for key in SETTLED_HERE if OmegaConf.select(config, key) == AUTO)
        if "precision" in settled:
            config.precision = _precision(device.type == "cuda" if on_gpu is None else on_gpu)
        if "microbatches" in settled:
            of_rank = -(-task.microbatches(config) // config.devices)
            config.microbatches = min(of_rank, config.batch_size // config.devices)
        if WEIGHTS in settled:
            config.model.weights = weights_of_source(config.model)
        dtype = DTYPES[config.precision]
        model = _model(config, dtype) if model is None else model
        mode, footprint = _mode(config, model)
        with keys_under("offload"):
            mode.check_device(device)
        blocks = _recomputed_blocks(config, model, mode)
        optimizer_class = get_class(config.optimizer._target_)
        parts = (task, model, mode, footprint, blocks, optimizer_class, settled)
        components = cls(config, invocation, device, dtype, *parts)
        components.check_sharing()
        return components

    @property
    def updates_overlap(self) -> bool:
        """True if the optimizer can update beside the step, as the mode asks it to."""
        return self.optimizer_class.overlaps

    @property
    def updates_begin_early(self) -> bool:
        """True if an update may begin inside backward.

        Clipping needs the norm of all gradients first, and `on_nonfinite=skip` needs to know that all are finite. On
        several devices gradients are sums over these, which are made after backward.
        """
        one_by_one = self.config.clip_norm is None and self.config.on_nonfinite == OnNonfinite.stop
        return one_by_one and self.config.devices == 1

    @property
    def shares_homes(self) -> bool:
        """True if the ranks of the run have one copy of what streams, in memory that they share."""
        mode = getattr(self.mode, "weights", self.mode)
        return self.config.devices > 1 and self.config.parallel.homes == Homes.shared and isinstance(mode, WeightMode)

    def check_sharing(self) -> None:
        """Raises UserError for what does not go together with homes that ranks share."""
        if not self.shares_homes:
            return
        own, share = "or parallel.homes=own", self.config.optimizer.get("device_share", 0)
        if share != AUTO and parse_bytes("optimizer.device_share", share):
            raise UserError(
                f"optimizer.device_share={share} with devices={self.config.devices}: states that the ranks share stay"
                f" on the host: give 0, {own}"
            )
        if self.state_format.state_dtype == "int8":
            raise UserError(
                "optimizer.state_dtype=int8 with parallel.homes=shared: the ranks' slices do not begin with its blocks"
                f" of 256 numbers: give bf16, {own}"
            )

    @property
    def state_format(self) -> StateFormat:
        """How the optimizer holds its states; masters and moments in float32 where it has no such knobs."""
        given = self.config.optimizer
        names = ("master", "state_dtype", "state_rounding")
        return StateFormat(*(str(given.get(name, default)) for name, default in zip(names, WIDEST, strict=True)))


def trained_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that train, in the model's order."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def footprint_of(config: DictConfig, mode: Mode, model: nn.Module) -> Footprint:
    """Returns the bytes that `mode` will hold and move. Raises UserError for a knob that does not fit the model.

    The mode knows afterwards where weights are in files, if it reads them from there.
    """
    map_weights(config, mode, model)
    with keys_under("offload"):
        return mode.footprint(model, recompute=recomputes(config))


def recomputes(config: DictConfig) -> bool:
    """Tells whether the configuration asks for recomputed blocks."""
    return issubclass(OmegaConf.get_type(config.recompute), RecomputeBlocks)


@contextmanager
def acquired(device: torch.device) -> Iterator[Streams]:
    """Acquires the streams of `device`, and releases them afterwards, whatever happens."""
    streams = acquire(device)
    try:
        yield streams
    finally:
        release(streams)


def _precision(on_gpu: bool) -> Precision:
    # Emulated, as on GPUs before Ampere, bfloat16 is slower than float32. A plan may be for a GPU that is not here.
    has_bf16 = not torch.cuda.is_available() or torch.cuda.is_bf16_supported(including_emulation=False)
    return Precision.bf16 if on_gpu and has_bf16 else Precision.fp32


def _model(config: DictConfig, dtype: torch.dtype) -> nn.Module:
    """Makes the model on the meta device. Raises UserError if the bytes of a tensor overflow an integer."""
    arguments = OmegaConf.to_container(config.model, resolve=True)
    arguments.pop("weights")
    if "source" in arguments:
        arguments["source"] = local_source(arguments["source"])
    try:
        with torch.device("meta"):
            model = instantiate(arguments).to(dtype).train()
    except InstantiationException as error:
        if "source" in arguments and isinstance(error.__cause__, ValueError):
            raise UserError(f"model.source={config.model.source}: {error.__cause__}") from error
        if "overflow" not in str(error.__cause__).lower():
            raise
        raise UserError("model: its sizes are beyond any memory: take smaller ones") from error
    quantise_blocks(model, config)
    if has_adapter(config):
        # Last, because the layers of an adapter depend on what its targets are.
        add_adapter(model, config, dtype)
    return model


def _mode(config: DictConfig, model: nn.Module) -> tuple[Mode, Footprint]:
    """Makes the offload mode and its footprint on `model`. Raises UserError for a knob that does not fit the model."""
    mode = make_mode(config.offload)
    return mode, footprint_of(config, mode, model)


def _recomputed_blocks(config: DictConfig, model: nn.Module, mode: Mode) -> tuple[nn.Module, ...]:
    """Finds the blocks to recompute. Raises UserError if `recompute.blocks` is not the path of a list of blocks."""
    if not recomputes(config) or mode.recomputes:
        return ()
    try:
        return tuple(block for _, block in find_blocks(model, config.recompute.blocks, key="recompute.blocks"))
    except ValueError as error:
        raise UserError(str(error)) from error
