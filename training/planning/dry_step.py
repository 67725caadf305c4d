"""Dry runs, on tensors without values: of a step, and of the forwards beside the steps (samples, a reference).

Of a step they compute the microbatches of one device. A sample is made between steps, when no activations of a step are
there; the forwards of a reference are in no time of a step. Batches whose shapes do not fit the model are refused
before libraries notice it inside forward.
"""

import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from unittest.mock import patch

import torch
from omegaconf import DictConfig
from torch import Tensor, nn

from models.pipelines.model import PipelineModel
from offload.planning import (
    DryRun,
    MemoryTracker,
    Phase,
    PlannedSharers,
    SimulatedStreams,
    dry_run,
    dry_run_forwards,
    fused_kernels,
    left_as_found,
)
from training.batches import Batch, examples_in
from training.config.construct import keys_under
from training.errors import UserError, first_line
from training.evaluation.held_out import evaluating
from training.parallel.sequence import pieces_of
from training.parallel.world import ranks_of_host, row_shares
from training.planning.encoding import decoding_bytes
from training.planning.machine import Machine
from training.settle.components import Components
from training.settle.tiles import in_tiles
from training.tasks.dpo import answer_log_probs
from training.tasks.task import loss_to_train

# Microbatches that the dry run computes one by one; the bytes of more follow from these.
MOST_DRY = 2
# What libraries and torch say of sizes, of numbers that count, and of ones that are missing (null in a configuration).
# Torch says so of a tensor without values too, but then it names meta tensors.
OF_SHAPES = re.compile(
    r"\b(shapes?|sizes?|channels?|dimensions?|reduction dim|output_size|out of range|divisible)\b"
    r"|must be \w+, not NoneType",
    re.IGNORECASE,
)


def dry_step(components: Components, has_gpu: bool, timed: SimulatedStreams | None = None) -> DryRun:
    """Runs a step on the meta device; of many microbatches it runs a few and derives the rest."""
    config = components.config
    count = config.microbatches
    small, larger = divmod(examples_of_rank(config), count)
    # The sizes that tensor_split makes.
    sizes = [small + 1] * larger + [small] * (count - larger)
    if count <= MOST_DRY:
        return _dry_run(components, sizes, has_gpu, timed)
    if components.footprint.layer_major:
        before = _dry_run(components, sizes[: MOST_DRY - 1], has_gpu)
        after = _dry_run(components, sizes[:MOST_DRY], has_gpu, timed)
        return before.continued(after, sum(sizes[MOST_DRY:]) / sizes[MOST_DRY - 1])
    # The first one differs: it has no earlier gradients to add to. The others are alike if they have the same size.
    others = Counter(sizes[1:])
    return _dry_run(components, [sizes[0], *others], has_gpu, timed).repeated([1, *others.values()])


def examples_of_rank(config: DictConfig) -> int:
    """Returns the examples of a step that rank 0 computes, which no other rank exceeds."""
    return -(-config.batch_size // row_shares(config))


def examples_of_microbatch(config: DictConfig) -> int:
    """Returns the examples of rank 0's largest microbatch."""
    return -(-examples_of_rank(config) // config.microbatches)


def meta_part(components: Components, examples: int) -> Batch:
    """Returns a batch of `examples` examples on the meta device; of rows that ranks divide, the part of one."""
    config = components.config
    batch = components.task.meta_batch(config, examples)
    return batch if config.parallel.sequence == 1 else pieces_of(batch, config.parallel.sequence)[0]


def _dry_run(
    components: Components, sizes: Sequence[int], has_gpu: bool, timed: SimulatedStreams | None = None
) -> DryRun:
    """Runs a step with microbatches of `sizes` examples."""
    config, model = components.config, components.model
    links = PlannedSharers(ranks_of_host(config), config.parallel.hosts, timed)
    with keys_under("task"):
        parts = [meta_part(components, size) for size in sizes]

    def loss_of(part: Batch) -> Tensor:
        return loss_to_train(components.task, model, part) * (examples_in(part) / config.batch_size)

    with in_tiles(config, model), _exchanges_counted(config, model, links):
        return dry_run(
            components.mode,
            model,
            [partial(loss_of, part) for part in parts],
            recomputed=components.recomputed_blocks,
            norms=True,
            timed=timed,
            on_gpu=has_gpu,
            sharers=links if components.shares_homes else None,
            links=links,
            options=components.options,
        )


def _exchanges_counted(config: DictConfig, model: nn.Module, links: PlannedSharers) -> AbstractContextManager:
    """Inside the block, what ranks exchange that divide rows of `model` comes over `links`."""
    return nullcontext() if config.parallel.sequence == 1 else patch.object(model.divided, "planned", links.receive)


def forward_flops(components: Components) -> float:
    """Returns the FLOPs of a step's forwards alone: the forward of a head may compute gradients too (`models.loss`)."""
    tracker = MemoryTracker()
    count_forward(components, tracker)
    return tracker.flops * components.config.batch_size * components.config.parallel.sequence


def count_forward(components: Components, tracker: MemoryTracker) -> None:
    """Lets `tracker` count the forward of one example, without gradients and outside of any mode."""
    model, example = components.model, meta_part(components, 1)
    with left_as_found(model), fused_kernels(tracker.add_flops), torch.no_grad(), tracker.recording():
        loss_to_train(components.task, model, example)


def without_dry_run(components: Components) -> DryRun:
    """Returns the bounds that the mode's footprint gives, without activations, as two phases."""
    footprint, config = components.footprint, components.config
    traffic = footprint.for_microbatches(config.microbatches)
    flops = (components.task.flops(components.model, config) or 0.0) / config.devices
    weights_in = min(footprint.host_weight_bytes, traffic.h2d_bytes)
    phases = (
        Phase(flops / 3, weights_in, 0, 0, 0),
        Phase(flops * 2 / 3, traffic.h2d_bytes - weights_in, traffic.d2h_bytes, 0, 0),
    )
    gradients = footprint.resident_gradient_bytes
    host = footprint.host_home_bytes + footprint.ring_bytes + footprint.host_gradient_bytes
    return DryRun(phases, footprint.slot_bytes, footprint.slot_bytes + gradients, gradients, 0, host)


def refuse_shapes(components: Components) -> None:
    """Raises UserError if the model refuses the shapes of a microbatch, or has sizes that contradict."""
    config, chosen = components.config, components.invocation.choices
    given = f"model={chosen['model']} with dataset={chosen['dataset']}: sizes do not fit each other"
    with _run_without_values(components.model, given, "change those of the dataset, or of the model"):
        batch = meta_part(components, examples_of_microbatch(config))
        components.task.loss(components.model, batch)


def refuse_sample_shape(components: Components) -> None:
    """Raises UserError if the model refuses the shape of samples that the user has given."""
    shape = components.config.task.get("sample_shape")
    if shape is None:
        return
    given = f"task.sample_shape={list(shape)}: the model takes no images of this shape"
    model = components.model
    with _run_without_values(model, given, "take another, or null for the model's own"), evaluating(model):
        for forward in components.task.sample_forwards(components.config, model):
            forward()


@contextmanager
def _run_without_values(model: nn.Module, given: str, advice: str) -> Iterator[None]:
    """Surrounds forwards of `model` on the meta device. Raises UserError for an error that is about shapes.

    Any other error is nothing: such a forward may still run on values.
    """
    try:
        with left_as_found(model), torch.no_grad():
            yield
    except Exception as error:
        problem = first_line(error)
        known = isinstance(error, (ValueError, RuntimeError, TypeError, IndexError))
        if known and OF_SHAPES.search(problem) and "meta" not in problem:
            raise UserError(f"{given} ({problem}): {advice}") from error


logger = logging.getLogger(__name__)


def sample_bytes(components: Components, has_gpu: bool) -> int:
    """Returns the bytes that a sample takes on the device besides weights and slots; 0 if the run makes none."""
    if components.config.sample.every is None:
        return 0
    if isinstance(components.model, PipelineModel):
        # The network predicts for one picture, without gradients: what decodes it takes more.
        return decoding_bytes(components, has_gpu)
    return peak_of(components, components.task.sample_forwards(components.config, components.model), has_gpu)


def peak_of(components: Components, forwards: Sequence[Callable[[], object]], has_gpu: bool) -> int:
    """Returns the peak bytes of `forwards`; 0 without any, and where the model needs values to run."""
    if not forwards or components.mode.foreign:
        return 0
    found = _dry_forwards(components, forwards, None, has_gpu)
    if found is None:
        refuse_sample_shape(components)
        return 0
    return found[0]


def reference_note(components: Components, machine: Machine, has_gpu: bool) -> str | None:
    """Tells which forwards a run makes beside its steps, and how long they take; None if the task makes none."""
    task, config = components.task, components.config
    if not (task.looks_ahead or task.needs_table):
        return None
    rows, ms = examples_of_microbatch(config), None
    asked = components if components.reference is None else components.reference
    if has_gpu:
        part = task.meta_batch(config, rows)
        forwards = [lambda: answer_log_probs(asked.model, part)] * 2
        found = _dry_forwards(asked, forwards, machine.simulated(components.dtype), has_gpu)
        ms = None if found is None else found[1] / 2
    if task.looks_ahead:
        each = "" if ms is None else f", about {ms * config.microbatches:,.0f} ms that are not in its planned time"
        by = "without the adapter" if components.reference is None else "by the copy"
        return f"task.reference={config.task.reference}: a step begins with a forward of all its pairs {by}{each}"
    # On every device at once.
    each = "" if ms is None else f", about {1000 / rows / config.devices * ms / 1e3:,.1f} s for 1,000 of the longest"
    return f"task.reference=cached: before the first step there is a forward of every pair{each}"


def _dry_forwards(
    components: Components, forwards: Sequence[Callable[[], object]], timed: SimulatedStreams | None, has_gpu: bool
) -> tuple[int, float] | None:
    """Runs forwards in a row without values: peak bytes and ms, None where the model needs values to run."""
    try:
        with evaluating(components.model), in_tiles(components.config, components.model):
            knobs = {"timed": timed, "on_gpu": has_gpu, "options": components.options}
            run = dry_run_forwards(components.mode, components.model, forwards, **knobs)
            return run.peak_bytes, run.ms
    except Exception as error:  # a model may fail in any way on tensors without values, and yet run on real ones
        logger.debug("no dry run of forwards", exc_info=error)
        return None
