"""Builds a job of a prepared run: model in its place, optimizer, tracking. Everything is given back afterwards."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property

import torch
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf
from torch import nn

from offload import Attached, HostAdamW, OwnOptimizer, Speculation, Streams
from offload.knobs import GIB, parse_bytes
from training.checkpoints.saving import Checkpoints
from training.config.construct import keys_under
from training.metrics.progress import phase, print_brief
from training.metrics.routers import RouterMeter
from training.metrics.run_names import chosen_options, model_name, run_label, run_name, run_tags
from training.metrics.wandb_tracker import Tracker, plain
from training.optim import build_schedule, by_decay, warn_of_rates
from training.parallel.ranks import ALONE, Ranks
from training.planning.fit import memory_explained
from training.planning.memory import planned_speculation
from training.profiling.hardware import record_hardware, vram_bytes, vram_peak_gib
from training.run.prepare import PreparedRun, prepare
from training.run.reference_model import AttachedModels, attached_models
from training.runs.invocation import Invocation
from training.settle.components import Components, acquired, trained_parameters
from training.weights.averages import Averages
from training.weights.filling import fill_buffers, fill_parameters


@dataclass(frozen=True, kw_only=True)
class RankJob:
    """The objects that every rank of a run has, to compute its steps."""

    components: Components
    attached: AttachedModels
    streams: Streams
    optimizer: HostAdamW | OwnOptimizer
    schedule: torch.optim.lr_scheduler.LambdaLR
    ranks: Ranks

    @cached_property
    def routers(self) -> RouterMeter:
        """Counts where the routers of a mixture of experts send tokens."""
        return RouterMeter(self.components.model)


@dataclass(frozen=True, kw_only=True)
class Job(RankJob, PreparedRun):
    """A prepared run that is ready for its loop."""

    tracker: Tracker
    checkpoints: Checkpoints
    averages: Averages | None


@contextmanager
def build(
    config: DictConfig, invocation: Invocation, begin: Callable[[], None] = lambda: None, ranks: Ranks = ALONE
) -> Iterator[Job]:
    """Builds the job that `config` describes, and gives model, memory, streams and tracking back afterwards.

    Calls `begin` once nothing of the run can be refused any more. Then the other `ranks` build their parts, with
    weights and states of this one, rank 0. Raises UserError, if possible before anything large is allocated.
    """
    torch.manual_seed(config.seed)
    run = prepare(config, invocation, ranks)
    components, plan, checkpoint, run_dir = run.components, run.plan, run.checkpoint, invocation.run_dir
    config = components.config
    begin()
    with acquired(components.device) as streams:
        with phase("measuring the bus"):
            hardware = record_hardware(streams, run_dir)
        plan.write(run_dir)
        if plan.encoding is None:
            # Else it was, before the encoding.
            print_brief(plan.brief(), f"Plan: {invocation.title} on {components.device}")
        # Before anything large is allocated, so that the tracker also records a run that has no memory.
        # Two runs that resume elsewhere from one checkpoint would be mixed in wandb.
        tracking_id = run.start.tracking_id if run.resumes_here else None
        tracker = build_tracker(components, hardware, tracking_id)
        explained = memory_explained(components, plan)
        speculation = planned_speculation(components, plan)
        ranks.begin(config, invocation, components.gradients.released, speculation)
        sharers = ranks.sharers(components.shares_homes)
        ranks.join_sequence(components.model)
        with (
            tracker.failing_with(),
            explained,
            keys_under("offload"),
            attached_models(components, streams, sharers) as attached,
        ):
            model = components.model
            fill_model(run, model)
            if run.reference is not None:
                run.reference.fill(components)
            with phase("allocating the optimizer's states, choosing its kernel"):
                optimizer = build_optimizer(components, attached.trained, speculation, ranks.cores)
            warn_of_rates(config)
            schedule = build_schedule(config, optimizer)
            averages = None if config.ema is None else Averages(model, config.ema)
            averaged = {} if averages is None else averages.tensors
            if checkpoint is not None:
                with phase("restoring the checkpoint"):
                    checkpoint.restore(model, optimizer, schedule, components.device, averaged)
                checkpoint.set_aside_later(run_dir)
            ranks.equalise(model, optimizer, run.start.step, attached.shared_parameters, attached.reference_model)
            checkpoints = Checkpoints(config, run_dir, model, optimizer, streams, run.base, averaged)
            yield Job(
                **vars(run),
                attached=attached,
                streams=streams,
                optimizer=optimizer,
                schedule=schedule,
                ranks=ranks,
                tracker=tracker,
                checkpoints=checkpoints,
                averages=averages,
            )


def fill_model(run: PreparedRun, model: nn.Module) -> None:
    """Gives the buffers of `model` values, and the parameters that no checkpoint will give theirs."""
    components = run.components
    fill_buffers(model)
    if run.checkpoint is None or run.adapter is not None:
        fill_parameters(model, components.config, components.device, run.weights)
    if run.adapter is not None:
        run.adapter.fill(model, components.device)


def build_optimizer(
    components: Components, attached: Attached, speculation: Speculation | None = None, cores: int | None = None
) -> HostAdamW | OwnOptimizer:
    """Makes the optimizer and its states. If the optimizer can update beside the step, it does.

    `speculation` lets updates begin before the norm of the gradients is known. `cores` is the number of cores of this
    rank, if ranks divide those of the host: the optimizer leaves one of them free, unless `optimizer.threads` is given.
    A mode that owns the update makes its own optimizer, with the same hyper-parameters. Raises MemoryError if the host
    has too little memory for the states.
    """
    config = components.config
    given = config.optimizer
    shares = cores is not None and "threads" in given and given.threads is None
    chosen = {"threads": max(cores - 1, 1)} if shares else {}
    params = trained_parameters(components.model)
    if not given.get("decay_norms_and_biases", True):
        params = by_decay(components.model, params)
    optimizer = instantiate(given, params=params, **chosen)
    if shares:
        optimizer.cores = cores
    if components.mode.owns_update:
        groups = optimizer.param_groups
        # The optimizer holds the parameters, whose memory the mode may replace.
        del optimizer
        return attached.own_optimizer(groups, config.clip_norm, config.microbatches)
    if optimizer.overlaps:
        share = 0 if optimizer.device_share == "auto" else optimizer.device_share
        attached.overlap(optimizer, components.updates_begin_early, share, speculation)
    optimizer.allocate()
    return optimizer


def place_states_in_spare_vram(job: RankJob) -> None:
    """With optimizer.device_share=auto, moves states to the GPU memory that the first step left of vram_budget."""
    components = job.components
    device, asked = components.device, components.config.vram_budget
    if job.optimizer.device_share != "auto" or asked is None or device.type != "cuda":
        return
    spare = min(parse_bytes("vram_budget", asked), vram_bytes(device)) - vram_peak_gib(device) * GIB
    job.attached.trained.place_states(components.room_for_states(spare))


def build_tracker(components: Components, hardware: dict, resume_id: str | None = None) -> Tracker:
    """Makes the run in wandb, named as in a comparison and tagged with its options, or continues that of `resume_id`.

    Its configuration also has `label`, the name without the seed, `choices`, the options, `machine`, the `hardware`,
    and of a mixture of experts what of transformers computes it.
    """
    config, invocation = components.config, components.invocation
    experts = getattr(components.model, "experts_implementation", None)
    facts = {"machine": hardware} | ({} if experts is None else {"experts_implementation": experts})
    chosen = chosen_options(invocation.choices, config) | {"model": model_name(config, invocation)}
    tags = [*run_tags(chosen), f"precision={config.precision}", *config.tracking.tags]
    return Tracker(
        **OmegaConf.to_container(config.tracking, enum_to_str=True)
        | {"name": run_name(config, invocation), "tags": tags},
        run_dir=invocation.run_dir,
        resume_id=resume_id,
        config={**plain(config), "label": run_label(config, invocation), "choices": chosen, **facts},
    )
