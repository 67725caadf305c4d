"""The dry run of a run's step: on tensors without values, of the microbatches that one device computes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial

from omegaconf import DictConfig
from torch import Tensor

from offload.planning import DryRun, Phase, SimulatedStreams, dry_run
from training.batches import Batch, examples_in
from training.config.construct import keys_under
from training.planning.ranks import planned_sharers
from training.settle.components import Components
from training.tasks.task import loss_to_train

# Microbatches that the dry run computes one by one; the bytes of more follow from these.
MOST_DRY = 2


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
    return -(-config.batch_size // config.devices)


def examples_of_microbatch(config: DictConfig) -> int:
    """Returns the examples of rank 0's largest microbatch."""
    return -(-examples_of_rank(config) // config.microbatches)


def _dry_run(
    components: Components, sizes: Sequence[int], has_gpu: bool, timed: SimulatedStreams | None = None
) -> DryRun:
    """Runs a step with microbatches of `sizes` examples."""
    config, model = components.config, components.model
    with keys_under("task"):
        parts = [components.task.meta_batch(config, size) for size in sizes]

    def loss_of(part: Batch) -> Tensor:
        return loss_to_train(components.task, model, part) * (examples_in(part) / config.batch_size)

    return dry_run(
        components.mode,
        model,
        [partial(loss_of, part) for part in parts],
        recomputed=components.recomputed_blocks,
        norms=True,
        timed=timed,
        on_gpu=has_gpu,
        sharers=planned_sharers(components, timed),
    )


def without_dry_run(components: Components) -> DryRun:
    """Returns the bounds that the mode's footprint gives, without activations, as two phases."""
    footprint, config = components.footprint, components.config
    traffic = footprint.for_microbatches(config.microbatches)
    flops = (components.task.flops(components.model, config) or 0.0) / config.devices
    weights_in = min(footprint.host_weight_bytes, traffic.h2d_bytes)
    phases = (
        Phase(True, flops / 3, weights_in, 0, 0, 0),
        Phase(False, flops * 2 / 3, traffic.h2d_bytes - weights_in, traffic.d2h_bytes, 0, 0),
    )
    gradients = footprint.resident_gradient_bytes
    host = footprint.host_home_bytes + footprint.ring_bytes + footprint.host_gradient_bytes
    return DryRun(phases, footprint.slot_bytes, footprint.slot_bytes + gradients, gradients, 0, host)
