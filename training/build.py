"""From configuration to a job that can run: device, data, model under its offload mode, optimizer, tracking."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.initialise import initialise
from models.weights import load_weights
from offload.activations.checkpointing import recompute
from offload.runtime import registry
from offload.runtime.byte_sizes import parse_bytes
from offload.runtime.host_cores import usable_cores
from offload.runtime.registry import Streams
from training.checkpoints.resuming import AUTO, Checkpoint, is_in, starting_point
from training.checkpoints.saving import Checkpoints
from training.checkpoints.state import RunState
from training.components import DTYPES, STATES_OF_SPARE, build_mode, build_model, recomputed_blocks, updates_early
from training.config.construct import keys_under
from training.errors import UserError
from training.metrics.progress import print_plan
from training.metrics.wandb_tracker import Tracker, chosen_options, plain, run_name, run_tags
from training.optim import build_schedule
from training.planning.machine import figures_of
from training.planning.oom_advice import device_memory_told
from training.planning.plan import plan_run
from training.planning.report import RunPlan
from training.profiling.hardware import record_hardware, resolve_device, vram_bytes, vram_peak_gib
from training.runs.directory import refuse_records
from training.runs.paths import home_expanded

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
    plan: RunPlan
    dataset: object
    optimizer: torch.optim.Optimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    tracker: Tracker
    start: RunState
    checkpoints: Checkpoints

    def __enter__(self) -> Job:
        return self

    def use_spare_vram(self) -> None:
        """After a step: with optimizer.device_share=auto, states go where that step left room under vram_budget."""
        if self.optimizer.device_share != "auto":
            return
        there, asked = vram_bytes(self.device), self.config.vram_budget
        budget = there if asked is None else parse_bytes("vram_budget", asked)
        if self.device.type == "cuda":
            budget = min(budget, there)
        spare = budget - vram_peak_gib(self.device) * 2**30
        self.mode.place_states(max(int(spare * STATES_OF_SPARE), 0))

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        """Ends tracking, and gives the model, the memory and the streams back."""
        if error is not None:
            self.tracker.fail(error)
        self.mode.detach()
        registry.release(self.streams)


def build(config: DictConfig, run_dir: Path, begin: Callable[[], None] = lambda: None) -> Job:
    """Builds the job that `config` describes; what it writes goes to `run_dir`.

    Calls `begin` when nothing of the run is refused any more, before it writes over what an earlier run left there.

    Raises UserError for whatever the user can mend, before anything large is allocated where it can be known then.
    """
    torch.manual_seed(config.seed)
    check_threads(config)
    device = resolve_device(config.device)
    dtype = DTYPES[config.precision]
    checkpoint = starting_point(config, run_dir)
    if not goes_on_here(config, checkpoint, run_dir):
        refuse_records(run_dir)
    dataset = build_dataset(config, run_dir)
    if checkpoint is not None:
        checkpoint.check_data(dataset)
    model = build_model(config, dtype)
    if dataset.vocab_size > config.model.vocab_size:
        raise UserError(
            f"model.vocab_size={config.model.vocab_size} is smaller than the tokenizer's {dataset.vocab_size}:"
            " take a larger model.vocab_size or another dataset.tokenizer"
        )
    choices = HydraConfig.get().runtime.choices
    mode, _ = build_mode(config, model)
    blocks = recomputed_blocks(config, model, mode)
    plan = plan_run(config, figures_of(config, device), has_gpu=device.type == "cuda")
    begin()
    streams = registry.acquire(device)
    hardware = record_hardware(streams, run_dir)
    plan.write(run_dir)
    print_plan(plan.rows(), title=f"Plan: offload={choices['offload']} model={choices['model']} on {device}")
    start = RunState() if checkpoint is None else checkpoint.state
    # Before anything large is allocated, so that a run which has no room for it is seen to have failed there too.
    tracker = build_tracker(config, run_dir, hardware, start.tracking_id)
    with tracker.failures_told(), device_memory_told(config, plan):
        try:
            with keys_under("offload"):
                mode.attach(model, streams)
        except MemoryError as error:
            raise UserError(f"offload={choices['offload']} model={choices['model']}: {error}: {ROOM}") from error
        if checkpoint is None:
            fill(model, config, device)
        # After the mode has attached, so that the recompute has its weights in place too.
        recompute(blocks)
        optimizer = build_optimizer(config, model, mode)
        schedule = build_schedule(config, optimizer)
        if checkpoint is not None:
            checkpoint.restore(model, optimizer, schedule, device)
            checkpoint.set_aside_later(run_dir)
        checkpoints = Checkpoints(config, run_dir, model, optimizer, streams)
    return Job(
        config,
        run_dir,
        device,
        dtype,
        streams,
        model,
        mode,
        plan,
        dataset,
        optimizer,
        schedule,
        tracker,
        start,
        checkpoints,
    )


def check_threads(config: DictConfig) -> None:
    """Raises UserError where the optimizer is to have more threads than there are cores, of which a plan needs none."""
    threads, cores = config.optimizer.get("threads"), usable_cores()
    if threads is not None and threads > cores:
        raise UserError(
            f"optimizer.threads={threads}: must be at most {cores}, the cores that this process may use, or null to"
            " choose"
        )


def goes_on_here(config: DictConfig, checkpoint: Checkpoint | None, run_dir: Path) -> bool:
    """Whether the run goes on with the metrics in `run_dir`: from a checkpoint there, or, with resume=auto, from none.

    A job that is queued again before its first checkpoint makes its first steps once more.
    """
    if checkpoint is None:
        return config.resume == AUTO
    return is_in(run_dir, checkpoint.folder)


def build_dataset(config: DictConfig, run_dir: Path):
    """The dataset of `config`; what it has to keep on disk goes under `run_dir`."""
    sizes = {key: config[key] for key in ("seed", "seq_len", "batch_size")}
    return instantiate(config.dataset, **sizes, cache_dir=run_dir / "datasets")


def fill(model: nn.Module, config: DictConfig, device: torch.device) -> None:
    """Puts values into the parameters wherever the mode has placed them: pretrained, or a function of the seed."""
    if config.model.weights is None:
        initialise(model, config.seed, device)
        return
    try:
        load_weights(model, home_expanded("model.weights", config.model.weights))
    except (ValueError, FileNotFoundError) as error:
        raise UserError(f"model.weights={config.model.weights}: {error}") from error


def build_optimizer(config: DictConfig, model: nn.Module, mode) -> torch.optim.Optimizer:
    """The optimizer with its states, its updates hidden behind the step where it can do that.

    Raises UserError where host or device have no room for the states.
    """
    choice = HydraConfig.get().runtime.choices["optimizer"]
    optimizer = instantiate(config.optimizer, params=model.parameters())
    try:
        if choice == "host_adamw":
            share = 0 if optimizer.device_share == "auto" else optimizer.device_share
            mode.overlap(optimizer, updates_early(config), share)
        optimizer.allocate()
    except MemoryError as error:
        raise UserError(f"optimizer={choice}: {error}: take a smaller model") from error
    return optimizer


def build_tracker(config: DictConfig, run_dir: Path, hardware: dict, resume_id: str | None = None) -> Tracker:
    """The run in wandb: named model-offload-seed, tagged with the chosen options.

    Beside the configuration it has `choices`, the options, and `machine`, what `hardware` says was found and measured.
    `resume_id` is that of the run that this one continues.
    """
    choices = HydraConfig.get().runtime.choices
    chosen = chosen_options(choices, config)
    return Tracker(
        **OmegaConf.to_container(config.tracking, enum_to_str=True)
        | {"tags": [*run_tags(chosen), f"precision={config.precision}", *config.tracking.tags]},
        name=run_name(choices, config.seed),
        run_dir=run_dir,
        resume_id=resume_id,
        config={**plain(config), "choices": chosen, "machine": hardware},
    )
