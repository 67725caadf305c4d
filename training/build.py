"""From configuration to a job that can run: device, data, model under its offload mode, optimizer, tracking."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.initialise import initialise
from models.weights import load_weights
from offload import registry
from offload.bandwidth import measure_bandwidth
from offload.blocks import find_blocks
from offload.host_optimizer import HostAdamW
from offload.plan import Plan, size
from offload.recompute import recompute
from offload.registry import Streams
from offload.sizes import parse_bytes
from training.errors import UserError
from training.hardware import describe, peak_flops, resolve_device, vram_bytes, vram_peak_gib
from training.progress import print_plan
from training.schedules import build_schedule
from training.schema import OnNonfinite, Precision
from training.tracking import Tracker, plain, run_name, run_tags

DTYPES = {Precision.bf16: torch.bfloat16, Precision.fp32: torch.float32}

# The gradients of what is updated on the device stay there with its states, and the allocator needs room to turn.
STATES_OF_SPARE = 0.8

ROOM = "take a smaller model, precision=bf16, or more on the device with offload.resident"


@dataclass
class Job:
    """Everything a run needs, built once before the loop; a context that gives it all back."""

    config: DictConfig
    run_dir: Path
    device: torch.device
    dtype: torch.dtype
    streams: Streams
    model: nn.Module
    mode: object
    plan: Plan
    dataset: object
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LRScheduler
    tracker: Tracker

    def __enter__(self) -> Job:
        return self

    def use_spare_vram(self) -> None:
        """After a step: with optimizer.device_share=auto, states go where that step left room under vram_budget."""
        if self.optimizer.device_share != "auto":
            return
        budget = vram_bytes(self.device) if self.config.vram_budget is None else self.config.vram_budget
        spare = parse_bytes("vram_budget", budget) - vram_peak_gib(self.device) * 2**30
        self.mode.place_states(max(int(spare * STATES_OF_SPARE), 0))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Ends tracking, and gives the model, the memory and the streams back."""
        if error is not None:
            self.tracker.finish({}, exit_code=1)
        self.mode.detach()
        registry.release(self.streams)


def build(config: DictConfig, run_dir: Path) -> Job:
    """Builds the job that `config` describes; what it writes goes to `run_dir`.

    Raises UserError for whatever the user can mend, before anything large is allocated where it can be known then.
    """
    torch.manual_seed(config.seed)
    device = resolve_device(config.device)
    dtype = DTYPES[config.precision]
    dataset = build_dataset(config, run_dir)
    model = build_model(config, dtype)
    if dataset.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {dataset.vocab_size}:"
            " take a larger model.vocab_size or another dataset.tokenizer"
        )
    choices = HydraConfig.get().runtime.choices
    recomputes = choices["recompute"] != "none"
    mode, plan = build_mode(config, model, recomputes)
    blocks = recomputed_blocks(config, model) if recomputes and not mode.recomputes else []
    streams = registry.acquire(device)
    rows = dict(plan.rows()) | {
        "optimizer states": size(HostAdamW.planned_bytes(model.parameters(), state_dtype(config))),
        "predicted floor of a step": predicted_floor(config, plan, model, streams, dtype),
    }
    print_plan(rows, title=f"Plan: offload={choices['offload']} model={choices['model']} on {device}")
    try:
        mode.attach(model, streams)
    except MemoryError as error:
        raise UserError(f"offload={choices['offload']} model={choices['model']}: {error}: {ROOM}") from error
    fill(model, config, device)
    # After the mode has attached, so that the recompute has its weights in place too.
    recompute(blocks)
    optimizer = build_optimizer(config, model, mode)
    schedule = build_schedule(config, optimizer)
    tracker = build_tracker(config, run_dir, device)
    return Job(config, run_dir, device, dtype, streams, model, mode, plan, dataset, optimizer, schedule, tracker)


def build_dataset(config: DictConfig, run_dir: Path):
    """The dataset of `config`; what it has to keep on disk goes under `run_dir`."""
    sizes = {key: config[key] for key in ("seed", "seq_len", "batch_size")}
    return instantiate(config.dataset, **sizes, cache_dir=run_dir / "datasets")


def build_model(config: DictConfig, dtype: torch.dtype) -> nn.Module:
    """The model on the meta device: shapes and names, no memory."""
    settings = OmegaConf.to_container(config.model, resolve=True)
    settings.pop("weights")
    with torch.device("meta"):
        return instantiate(settings).to(dtype)


def build_mode(config: DictConfig, model: nn.Module, recomputes: bool) -> tuple[object, Plan]:
    """The offload mode and its plan for `model`. Raises UserError for a knob that does not fit the model."""
    try:
        mode = instantiate(config.offload)
        return mode, mode.plan(model, recompute=recomputes)
    except (InstantiationException, ValueError) as error:
        cause = error.__cause__ if isinstance(error, InstantiationException) else error
        if not isinstance(cause, ValueError):
            raise
        raise UserError(str(cause)) from error


def predicted_floor(config: DictConfig, plan: Plan, model: nn.Module, streams: Streams, dtype: torch.dtype) -> str:
    """The time of a step that neither the bus nor the device's peak arithmetic allows to beat, for people."""
    traffic = plan.for_microbatches(config.microbatches)
    flops = model.flops_per_token(config.seq_len) * config.seq_len * config.batch_size
    compute_ms = flops / peak_flops(streams.device, dtype) * 1e3
    floor_ms, bound = compute_ms, "compute"
    if plan.units:
        floor_ms, bound = traffic.floor_ms(measure_bandwidth(streams, nbytes=64 * 2**20, repeats=3), compute_ms)
    return f"{floor_ms:.1f} ms, bound by {bound}"


def recomputed_blocks(config: DictConfig, model: nn.Module) -> list[nn.Module]:
    """The blocks whose activations are recomputed. Raises UserError where the path leads to none."""
    try:
        return [block for _, block in find_blocks(model, config.recompute.blocks, key="recompute.blocks")]
    except ValueError as error:
        raise UserError(str(error)) from error


def fill(model: nn.Module, config: DictConfig, device: torch.device) -> None:
    """Puts values into the parameters wherever the mode has placed them: pretrained, or a function of the seed."""
    if config.model.weights is None:
        initialise(model, config.seed, device)
        return
    try:
        load_weights(model, config.model.weights)
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"model.weights={config.model.weights}: {error}") from error


def state_dtype(config: DictConfig) -> str:
    """The dtype of the optimizer's moments, "fp32" where it knows no other."""
    return str(config.optimizer.get("state_dtype", "fp32"))


def build_optimizer(config: DictConfig, model: nn.Module, mode) -> torch.optim.Optimizer:
    """The optimizer with its states, its updates hidden behind the step where it can do that.

    Raises UserError where host or device have no room for the states.
    """
    choice = HydraConfig.get().runtime.choices["optimizer"]
    optimizer = instantiate(config.optimizer, params=model.parameters())
    if choice == "host_adamw":
        # What must be known of all gradients first, their norm or that they are finite, is known after backward.
        early = config.clip_norm is None and config.on_nonfinite == OnNonfinite.stop
        mode.overlap(optimizer, early, 0 if optimizer.device_share == "auto" else optimizer.device_share)
    try:
        optimizer.allocate()
    except MemoryError as error:
        raise UserError(f"optimizer={choice}: {error}: take a smaller model") from error
    return optimizer


def build_tracker(config: DictConfig, run_dir: Path, device: torch.device) -> Tracker:
    """The run in wandb: named model-offload-seed, tagged with the chosen options, with config and hardware."""
    choices = HydraConfig.get().runtime.choices
    chosen = {group: choices[group] for group in config if group in choices}
    return Tracker(
        **OmegaConf.to_container(config.tracking, enum_to_str=True)
        | {"tags": [*run_tags(chosen), *config.tracking.tags]},
        name=run_name(chosen, config.seed),
        run_dir=run_dir,
        config={**plain(config), "choices": chosen, "hardware": describe(device)},
    )
