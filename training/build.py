"""Builds a job: components, plan, model in its place, optimizer, tracking. Everything is given back afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload import GIB, HostAdamW, OwnOptimizer, Speculation, Streams, parse_bytes, usable_cores
from training.adapters import RunAdapter
from training.checkpoints.base import BaseReference
from training.checkpoints.resuming import Checkpoint, is_in, starting_point
from training.checkpoints.saving import Checkpoints
from training.checkpoints.state import RunState
from training.components import STATES_OF_SPARE, Components, acquired, attached, trained_parameters
from training.config.auto import AUTO
from training.config.construct import keys_under
from training.config.validation import check_steps
from training.errors import UserError
from training.evaluation import Evaluation
from training.filling import fill_buffers, fill_parameters
from training.mapped_weights import is_mapped
from training.metrics.progress import phase, print_plan
from training.metrics.wandb_tracker import Tracker, chosen_options, plain, run_name, run_tags
from training.missing_abilities import without_abilities
from training.model_weights import ModelWeights
from training.optim import build_schedule
from training.parallel.ranks import ALONE, Ranks
from training.planning.fit import refuse_misfit
from training.planning.machine import machine_of
from training.planning.oom_advice import memory_explained
from training.planning.plan import plan_filled
from training.planning.report import RunPlan
from training.planning.speculation import planned_speculation
from training.profiling.hardware import record_hardware, resolve_device, vram_bytes, vram_peak_gib
from training.quantise_comparison import loss_of_base, loss_of_first, report
from training.runs.directory import refuse_records
from training.runs.files import DATASETS_FOLDER
from training.runs.invocation import Invocation
from training.samples import Samples


@dataclass(frozen=True)
class RankJob:
    """The objects that every rank of a run has, to compute its steps."""

    components: Components
    streams: Streams
    optimizer: HostAdamW | OwnOptimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    ranks: Ranks


@dataclass(frozen=True)
class Job(RankJob):
    """A run that is ready for its loop.

    Attributes:
        start: how far the run was when it was saved; for a new run, step 0.
        notes: how the run differs from what its configuration asks for.
    """

    plan: RunPlan
    dataset: object
    evaluation: Evaluation
    samples: Samples
    start: RunState
    tracker: Tracker
    checkpoints: Checkpoints
    notes: tuple[str, ...] = ()


@contextmanager
def build(
    config: DictConfig,
    invocation: Invocation,
    begin: Callable[[], None] = lambda: None,
    ranks: Ranks = ALONE,
) -> Iterator[Job]:
    """Builds the job that `config` describes, and gives model, memory, streams and tracking back afterwards.

    Calls `begin` once nothing of the run can be refused any more, before files of an earlier run are overwritten. Then
    the other `ranks` build their parts, and get weights and states from this one, which is rank 0.

    Raises UserError for everything that the user can fix, if possible before anything large is allocated.
    """
    torch.manual_seed(config.seed)
    check_threads(config)
    components = Components.of(config, invocation, resolve_device(config.device))
    # The run's own config.yaml keeps what was asked for, so that runs are compared by it.
    config, notes = without_abilities(config, components.mode)
    components = replace(components, config=config)
    checkpoint = starting_point(config, invocation.run_dir)
    if not resumes_here(config, checkpoint, invocation.run_dir):
        refuse_records(invocation.run_dir)
    adapter = RunAdapter.of(config, starts=checkpoint is None)
    weights = weights_of_run(config, checkpoint, adapter)
    with phase("reading the dataset"):
        dataset = build_dataset(config, components.model, invocation.run_dir)
    if config.epochs is not None:
        # The run's own config.yaml keeps `epochs` alone, so that it can be given again.
        config = with_steps(config, dataset)
        components = replace(components, config=config)
    components.task.check(config, dataset, components.model)
    evaluation = Evaluation.of(config, components.task, dataset)
    samples = Samples.of(config, components.task, components.model)
    if checkpoint is not None:
        checkpoint.check_steps(config.steps)
        checkpoint.check_data(dataset, evaluation.sha256)
    with phase("measuring the machine"):
        machine = machine_of(components)
    with phase("planning"):
        components, plan = plan_filled(components, machine, has_gpu=components.device.type == "cuda")
    refuse_misfit(components, plan)
    ranks.check_model(components.model)
    base = None if adapter is None else base_of_run(config, checkpoint, weights)
    begin()
    start = RunState() if checkpoint is None else checkpoint.state
    with acquired(components.device) as streams:
        with phase("measuring the bus"):
            hardware = record_hardware(streams, invocation.run_dir)
        plan.write(invocation.run_dir)
        print_plan(plan.rows(), title=f"Plan: {invocation.title} on {components.device}")
        # Before anything large is allocated, so that the tracker also records a run that has no memory.
        tracker = build_tracker(config, invocation, hardware, start.tracking_id)
        explained = memory_explained(components, plan)
        with tracker.failing_with():
            base_loss = None if checkpoint is not None else loss_of_base(components, streams, dataset, weights)
        ranks.begin(components.config, invocation)
        sharers = ranks.sharers(components.shares_homes)
        with tracker.failing_with(), explained, keys_under("offload"), attached(components, streams, sharers) as model:
            fill_buffers(model)
            if checkpoint is None or adapter is not None:
                fill_parameters(model, config, components.device, weights)
            if adapter is not None:
                adapter.fill(model, components.device)
            if base_loss is not None:
                report(components, loss_of_first(components, model, streams, dataset), base_loss)
            with phase("allocating the optimizer's states, choosing its kernel"):
                optimizer = build_optimizer(components, planned_speculation(components, plan))
            schedule = build_schedule(config, optimizer)
            if checkpoint is not None:
                with phase("restoring the checkpoint"):
                    checkpoint.restore(model, optimizer, schedule, components.device)
                checkpoint.set_aside_later(invocation.run_dir)
            ranks.equalise(model, optimizer, start.step, components.mode.shared_parameters())
            checkpoints = Checkpoints(config, invocation.run_dir, model, optimizer, streams, base)
            checkpoints.remove_leftovers(start.step)
            parts = components, streams, optimizer, schedule, ranks
            yield Job(*parts, plan, dataset, evaluation, samples, start, tracker, checkpoints, notes)


def check_threads(config: DictConfig) -> None:
    """Raises UserError if the optimizer is to have more threads than there are cores. A plan needs no threads."""
    threads, cores = config.optimizer.get("threads"), usable_cores()
    if threads is not None and threads > cores:
        raise UserError(
            f"optimizer.threads={threads}: must be at most {cores}, the cores that this process may use, or null to"
            " choose"
        )


def resumes_here(config: DictConfig, checkpoint: Checkpoint | None, run_dir: Path) -> bool:
    """Tells whether the run continues the metrics in `run_dir`.

    It does if its checkpoint is there, and with resume=auto also without one: a job that is queued again before its
    first checkpoint repeats its first steps.
    """
    if checkpoint is None:
        return config.resume == AUTO
    return is_in(run_dir, checkpoint.folder)


def weights_of_run(
    config: DictConfig, checkpoint: Checkpoint | None, adapter: RunAdapter | None
) -> ModelWeights | None:
    """Finds the weights that fill the model, or the base of its adapter; None: those of the checkpoint, or the seed's.

    Raises UserError if there are no such weights, or they cannot stay in their files.
    """
    # A checkpoint of an adapter does not have the base.
    if config.model.weights is not None and (checkpoint is None or adapter is not None):
        return ModelWeights.find(config.model.weights)
    if is_mapped(config):
        raise UserError(
            f"resume={checkpoint.folder}: a checkpoint of a whole model is loaded into memory, so its weights cannot"
            " stay in the files of model.weights: take source=memory"
        )
    return None


def base_of_run(config: DictConfig, checkpoint: Checkpoint | None, weights: ModelWeights | None) -> BaseReference:
    """Names the frozen base of an adapter by its seed, or by the files of `weights`, which it hashes.

    Raises UserError if the base of the checkpoint is another.
    """
    with phase("hashing the frozen weights"):
        base = BaseReference.of(config.seed, weights)
    if checkpoint is not None:
        base.check(checkpoint.folder, f"resume={checkpoint.folder}")
    return base


def build_dataset(config: DictConfig, model: nn.Module, run_dir: Path):
    """Makes the dataset of `config`; its cache goes under `run_dir`. Random tokens and conditions fit `model`."""
    sizes = {key: config[key] for key in ("seed", "seq_len", "batch_size")}
    if "vocab_size" in config.dataset and config.dataset.vocab_size is None:
        if not hasattr(model, "vocab_size"):
            raise UserError(
                f"dataset.vocab_size=null: {type(model).__name__} has no vocabulary: choose a dataset of images, and"
                " task=flow_matching or classification"
            )
        sizes["vocab_size"] = model.vocab_size
    return instantiate(config.dataset, **sizes, cache_dir=run_dir / DATASETS_FOLDER)


def with_steps(config: DictConfig, dataset) -> DictConfig:
    """Returns a copy of `config` with the number of steps, the last one maybe partial, that its `epochs` take.

    Raises UserError if the dataset does not know its number of examples, or another key lies beyond the last step.
    """
    if dataset.num_blocks is None:
        raise UserError(
            f"epochs={config.epochs:g}: this dataset does not know how many examples it has: give steps=N epochs=null"
        )
    config = config.copy()
    config.steps = math.ceil(config.epochs * dataset.num_blocks / config.batch_size)
    check_steps(config)
    return config


def build_optimizer(components: Components, speculation: Speculation | None = None) -> HostAdamW | OwnOptimizer:
    """Makes the optimizer and its states; its updates run beside the step if it can do that.

    `speculation` lets them begin before the norm of the gradients is known.

    A mode that owns the update makes its own, with the same hyper-parameters.

    Raises MemoryError if the host has too little memory for the states.
    """
    config, mode = components.config, components.mode
    optimizer = instantiate(config.optimizer, params=trained_parameters(components.model))
    if mode.owns_update:
        groups = optimizer.param_groups
        # It holds the parameters, whose memory the mode may replace.
        del optimizer
        return mode.own_optimizer(groups, config.clip_norm, config.microbatches)
    mode.divide(optimizer)
    if optimizer.overlaps:
        share = 0 if optimizer.device_share == "auto" else optimizer.device_share
        mode.overlap(optimizer, components.updates_begin_early, share, speculation)
    optimizer.allocate()
    return optimizer


def place_states_in_spare_vram(job: RankJob) -> None:
    """After the first step: moves optimizer states to the device memory that the step left free under vram_budget.

    Does nothing unless optimizer.device_share=auto and a budget is set.
    """
    components = job.components
    device, asked = components.device, components.config.vram_budget
    if job.optimizer.device_share != "auto" or asked is None:
        return
    budget = parse_bytes("vram_budget", asked)
    if device.type == "cuda":
        budget = min(budget, vram_bytes(device))
    spare = budget - vram_peak_gib(device) * GIB
    components.mode.place_states(max(int(spare * STATES_OF_SPARE), 0))


def build_tracker(config: DictConfig, invocation: Invocation, hardware: dict, resume_id: str | None = None) -> Tracker:
    """Makes the run in wandb: named model-offload-seed, tagged with the chosen options.

    Its configuration has two more entries: `choices`, the options, and `machine`, which is `hardware`. `resume_id` is
    that of the run that this one continues.
    """
    chosen = chosen_options(invocation.choices, config)
    return Tracker(
        **OmegaConf.to_container(config.tracking, enum_to_str=True)
        | {"tags": [*run_tags(chosen), f"precision={config.precision}", *config.tracking.tags]},
        name=run_name(invocation.choices, config.seed),
        run_dir=invocation.run_dir,
        resume_id=resume_id,
        config={**plain(config), "choices": chosen, "machine": hardware},
    )
