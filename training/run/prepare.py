"""Prepares a run: all that can be refused, before anything of it is written and anything large is allocated."""

import logging
import math
from dataclasses import dataclass, replace

from omegaconf import DictConfig

from offload.planning import usable_cores
from training.checkpoints.base import BaseReference
from training.checkpoints.changes import warn_of_steps
from training.checkpoints.resuming import Checkpoint, is_in, starting_point
from training.checkpoints.saving import check_best
from training.checkpoints.state import RunState
from training.config.declare import AUTO
from training.config.modes import weights_node
from training.data.datasets import build_dataset, facts_of
from training.errors import UserError
from training.evaluation.held_out import Evaluation
from training.evaluation.reference import saved_reference
from training.evaluation.samples import Samples
from training.metrics.progress import phase, print_brief
from training.parallel.ranks import Ranks
from training.planning.encoding import planned_encoding
from training.planning.fit import refuse_misfit
from training.planning.machine import machine_of
from training.planning.plan import plan_filled
from training.planning.report import RunPlan
from training.profiling.hardware import resolve_device
from training.run.encoding import encode_missing
from training.run.reference_model import ReferenceOrigin
from training.runs.directory import refuse_records
from training.runs.invocation import Invocation
from training.settle.components import Components
from training.settle.missing_abilities import without_abilities
from training.weights.adapter import RunAdapter
from training.weights.files import ModelWeights
from training.weights.mapped import is_mapped
from training.weights.model_tokenizer import refuse_foreign_tokenizer
from training.weights.source import source_digest

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that nothing refuses any more. Its model has no values yet.

    Attributes:
        components: their configuration is without what the mode cannot do, and has epochs as steps.
        checkpoint: where the run resumes; None for a new one.
        resumes_here: it continues the records of its directory, and those in wandb.
        adapter: what trains beside a frozen base, if an adapter does.
        weights: the files that fill the model, or the base of the adapter; None: the checkpoint or the seed does.
        base: the frozen base of the adapter, for checkpoints.
        reference: what fills the second model of a task that has one.
        source_sha256: of the config.json from which the model is made, for checkpoints.
    """

    components: Components
    plan: RunPlan
    dataset: object
    evaluation: Evaluation
    samples: Samples
    checkpoint: Checkpoint | None
    resumes_here: bool
    adapter: RunAdapter | None
    weights: ModelWeights | None
    base: BaseReference | None
    reference: ReferenceOrigin | None
    source_sha256: str | None

    @property
    def start(self) -> RunState:
        """The place of the run when it was saved; for a new run, step 0."""
        return RunState() if self.checkpoint is None else self.checkpoint.state


def prepare(config: DictConfig, invocation: Invocation, ranks: Ranks) -> PreparedRun:
    """Makes components, dataset and plan, finds weights and checkpoint. Raises UserError, MisfitError of the plan."""
    check_threads(config)
    components = Components.of(config, invocation, resolve_device(config.device))
    # The run's own config.yaml keeps what was asked for, so that runs are compared by it.
    components = components.with_config(*without_abilities(config, components.mode))
    config = components.config
    checkpoint = starting_point(config, invocation.run_dir)
    source_sha256 = source_digest(config.model)
    if checkpoint is not None:
        checkpoint.check_files(config.model.get("source"), source_sha256, components.task)
    # A job that is queued again before its first checkpoint repeats its first steps.
    here = config.resume == AUTO if checkpoint is None else is_in(invocation.run_dir, checkpoint.folder)
    if not here:
        refuse_records(invocation.run_dir)
    adapter = RunAdapter.of(config, components.model, starts=checkpoint is None)
    weights = weights_of_run(config, checkpoint, adapter)
    refuse_foreign_tokenizer(config, download=True)
    with phase("reading the dataset"):
        dataset = build_dataset(config, components.model, invocation.run_dir)
    if config.epochs is not None:
        # The run's own config.yaml keeps `epochs` alone, so that it can be given again.
        config = with_steps(config, dataset)
        components = components.with_config(config)
    components.task.check(config, dataset, components.model)
    check_best(config, components.task)
    # Before pictures are encoded.
    samples = Samples.of(config, components.task, components.model)
    with phase("measuring the machine"):
        machine = machine_of(components)
    components.begin_compiling()
    has_gpu = components.device.type == "cuda"
    with planned_encoding(dataset, components, machine, has_gpu) as encoding:
        if encoding is None:
            # The plan needs its results.
            encode_missing(dataset, components)
        with phase("planning"):
            components, plan = plan_filled(components, machine, has_gpu)
    plan = replace(plan, facts=facts_of(dataset), encoding=encoding)
    refuse_misfit(components, plan)
    if encoding is not None:
        print_brief(plan.brief(), f"Plan: {invocation.title} on {components.device}")
        encode_missing(dataset, components, encoding)
    evaluation = Evaluation.of(config, components.task, dataset)
    if dataset.num_blocks is not None and config.batch_size > dataset.num_blocks:
        logger.warning(
            "batch_size=%d: the dataset has %d examples, so a step trains on some of them several times (a step of"
            " TRL's would be smaller): take batch_size=%d, or give more",
            *(config.batch_size, dataset.num_blocks, dataset.num_blocks),
        )
    if checkpoint is not None:
        checkpoint.check_steps(config.steps)
        warn_of_steps(config, checkpoint.config)
        checkpoint.check_data(dataset, evaluation.sha256)
        if components.task.needs_table and checkpoint.state.step:
            components.task.table = saved_reference(checkpoint.folder, config, dataset)
    ranks.check_model(components.model)
    base = None if adapter is None else base_of_run(config, checkpoint, weights)
    return PreparedRun(
        components=components,
        plan=plan,
        dataset=dataset,
        evaluation=evaluation,
        samples=samples,
        checkpoint=checkpoint,
        resumes_here=here,
        adapter=adapter,
        weights=weights,
        base=base,
        reference=ReferenceOrigin.of(components, checkpoint, weights, base),
        source_sha256=source_sha256,
    )


def check_threads(config: DictConfig) -> None:
    """Raises UserError if the optimizer is to have more threads than there are cores. A plan needs no threads."""
    threads, cores = config.optimizer.get("threads"), usable_cores()
    if threads is not None and threads > cores:
        raise UserError(
            f"optimizer.threads={threads}: must be at most {cores}, the cores that this process may use, or null to"
            " choose"
        )


def weights_of_run(
    config: DictConfig, checkpoint: Checkpoint | None, adapter: RunAdapter | None
) -> ModelWeights | None:
    """Finds the weights that fill the model, or the base of its adapter; None: the checkpoint or the seed fills it.

    Raises UserError if model.weights names none, or a checkpoint of a whole model cannot stay in its files.
    """
    # A checkpoint of an adapter does not have the base.
    if config.model.weights is not None and (checkpoint is None or adapter is not None):
        return ModelWeights.find(config.model.weights)
    if is_mapped(config):
        raise UserError(
            f"resume={checkpoint.folder}: a checkpoint of a whole model is loaded into memory, so its weights cannot"
            f" stay in the files of model.weights: take {weights_node(config)[0]}.source=memory"
        )
    return None


def base_of_run(config: DictConfig, checkpoint: Checkpoint | None, weights: ModelWeights | None) -> BaseReference:
    """Names the frozen base of an adapter by seed or hashes. Raises UserError if the checkpoint has another base."""
    with phase("hashing the frozen weights"):
        base = BaseReference.of(config.seed, weights)
    if checkpoint is not None:
        base.check(checkpoint.folder, f"resume={checkpoint.folder}")
    return base


def with_steps(config: DictConfig, dataset) -> DictConfig:
    """Returns `config` with the steps that its `epochs` take. Raises UserError for a dataset of unknown length."""
    if dataset.num_blocks is None:
        raise UserError(
            f"epochs={config.epochs:g}: this dataset does not know how many examples it has: give steps=N epochs=null"
        )
    config = config.copy()
    config.steps = math.ceil(config.epochs * dataset.num_blocks / config.batch_size)
    return config
