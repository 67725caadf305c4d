"""Plans a run: the bytes that it will hold and move, the time of a step and its bottleneck, and whether it fits.

Nothing large is allocated and no GPU is needed. A dry run of the step on the meta device (`offload.planning.dry_run`)
counts bytes, and times follow from the speeds of a machine (`training.planning.machine`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from omegaconf import DictConfig
from torch import Tensor

from models.loss import Head, tokens_per_chunk
from offload.planning.cost_model import forecast, hidden_share
from offload.planning.dry_run import DryRun, Phase, dry_run
from offload.planning.simulated_streams import SimulatedStreams
from offload.runtime.byte_sizes import GIB, parse_bytes
from training.components import Components, left_as_found
from training.errors import UserError, first_line
from training.metrics.files import write_summary
from training.metrics.progress import print_plan
from training.planning.machine import Machine, is_complete, machine_of
from training.planning.optimizer import PlannedUpdate
from training.planning.report import RunPlan
from training.profiling.hardware import resolve_device, rss_gib
from training.profiling.timeline import Interval, Timeline, draw_chart
from training.runs.files import PLAN_PICTURE
from training.runs.invocation import Invocation

# Microbatches that the dry run computes one by one; the bytes of more follow from these.
MOST_DRY = 4

NO_GPU = "no GPU here: the CPU is planned for; hardware=h200, a100 or rtx4090 plans for one"

WAITS_FOR_UPDATES = "optimizer=host_adamw hides updates on the host behind the step, most of all with clip_norm=null"

logger = logging.getLogger(__name__)


def plan_only(config: DictConfig, invocation: Invocation) -> dict:
    """Does all of `plan=true`: prints the plan, writes plan.json and a summary, and returns the summary.

    The summary's status is "planned", and its reason names the part that does not fit. Raises UserError as a run would.
    """
    device = resolve_device("auto" if is_complete(config) else config.device)
    components = Components.of(config, invocation, device)
    machine = machine_of(components)
    plan = plan_run(components, machine, has_gpu=machine.vram_gib is not None)
    if not plan.has_gpu:
        plan = replace(plan, notes=(*plan.notes, NO_GPU))
    print_plan(plan.rows(), title=f"Plan: {invocation.title}")
    plan.write(invocation.run_dir)
    if plan.timeline:
        title = f"planned: {invocation.choices['offload']}, {invocation.choices['model']} on {machine.name}"
        draw_timeline(plan, config.microbatches, invocation.run_dir / PLAN_PICTURE, title)
    summary = {"status": "planned", "reason": plan.misfit(), **plan.summary()}
    write_summary(invocation.run_dir, summary)
    return summary


def draw_timeline(plan: RunPlan, microbatches: int, path: Path, title: str) -> None:
    """Draws forward and backward of the dry run; the title has the length of the whole step, which is longer.

    Of more than `MOST_DRY` microbatches only the first are drawn.
    """
    intervals = (Interval(work.lane, work.start_ms * 1e3, work.end_ms * 1e3) for work in plan.timeline)
    ordered = tuple(sorted(intervals, key=lambda interval: interval.start_us))
    some = f" of some of {microbatches} microbatches" if microbatches > MOST_DRY else ""
    part = f"step of {plan.forecast.step_ms:,.1f} ms, of it forward and backward{some}"
    draw_chart(Timeline(ordered, overlaps=True), path, f"{title}; {part}")


def plan_run(components: Components, machine: Machine, has_gpu: bool) -> RunPlan:
    """Plans the run that `components` make up, on `machine`; leaves the components as they were.

    If the model cannot run without values, activations are not in the plan, and a note says why.
    """
    footprint, flops_per_s = components.footprint, machine.flops_per_s(components.dtype)
    notes = []
    step = None
    timed = SimulatedStreams(torch.device("meta"), machine.bandwidth, flops_per_s) if has_gpu else None
    try:
        step = dry_step(components, has_gpu, timed)
    except UserError:
        raise
    except Exception as error:  # a model may fail in any way on tensors without values, and yet run on real ones
        logger.debug("no dry run", exc_info=error)
        notes.append(f"activations are not in the plan: this model needs values to run ({first_line(error)})")
    if step is None:
        # The timeline ends where the dry run failed, so it is of no use.
        step, timed = _without_dry_run(components), None
    if footprint.activation_budget_bytes is None:
        share = hidden_share(step.phases, machine.bandwidth, flops_per_s)
        step = step.swapping(share)
        notes.append(f"offload.budget=auto: {share:.0%} of the activations taken to be hidden behind compute")
        # The timeline is that of the dry run, which swaps everything.
        timed = None
    plan = _assembled(components, machine, has_gpu, step, timed)
    waits = plan.forecast.bound == "host optimizer" and not components.updates_overlap
    if has_gpu and footprint.units and waits:
        notes.append(WAITS_FOR_UPDATES)
    return replace(plan, notes=tuple(notes))


def dry_step(components: Components, has_gpu: bool, timed: SimulatedStreams | None = None) -> DryRun:
    """Runs a step on the meta device; of many microbatches it runs a few and derives the rest."""
    config = components.config
    count = config.microbatches
    small, larger = divmod(config.batch_size, count)
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


def _dry_run(
    components: Components, sizes: Sequence[int], has_gpu: bool, timed: SimulatedStreams | None = None
) -> DryRun:
    """Runs a step with microbatches of `sizes` sequences."""
    config, model = components.config, components.model
    parts = [torch.empty((size, config.seq_len + 1), dtype=torch.int64, device="meta") for size in sizes]

    def loss_of(tokens: Tensor) -> Tensor:
        return model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / config.batch_size)

    with left_as_found(model):
        return dry_run(
            components.mode,
            model,
            [partial(loss_of, tokens) for tokens in parts],
            recomputed=components.recomputed_blocks,
            norms=True,
            timed=timed,
            on_gpu=has_gpu,
        )


def _without_dry_run(components: Components) -> DryRun:
    """Returns the bounds that the mode's footprint gives, without activations, as two phases."""
    footprint, config = components.footprint, components.config
    traffic = footprint.for_microbatches(config.microbatches)
    flops = components.model.flops_per_token(config.seq_len) * config.seq_len * config.batch_size
    weights_in = min(footprint.host_weight_bytes, traffic.h2d_bytes)
    phases = (
        Phase(True, flops / 3, weights_in, 0, 0, 0),
        Phase(False, flops * 2 / 3, traffic.h2d_bytes - weights_in, traffic.d2h_bytes, 0, 0),
    )
    gradients = sum(tensor.nbytes for tensor in footprint.resident if tensor.requires_grad)
    host = footprint.host_weight_bytes + footprint.host_gradient_bytes
    return DryRun(phases, footprint.slot_bytes, footprint.slot_bytes + gradients, gradients, 0, host)


def _assembled(
    components: Components, machine: Machine, has_gpu: bool, step: DryRun, timed: SimulatedStreams | None
) -> RunPlan:
    """Puts the dry run, the update and the budgets together."""
    config, footprint = components.config, components.footprint
    vram_budget = _budget("vram_budget", config.vram_budget, machine.vram_gib) if has_gpu else None
    device = {
        "weights": footprint.resident_bytes,
        "slots": step.slot_bytes,
        "gradients": step.peak_gradient_bytes,
        "activations": step.activation_bytes,
    }
    update = PlannedUpdate.of(components, spare_bytes=(vram_budget or 0) - sum(device.values()))
    device["optimizer"] = update.device_bytes
    if not components.updates_begin_early:
        # Early updates free these gradients while backward still frees activations, so they add nothing to the peak.
        device["gradients"] += update.placed_gradient_bytes
    host = {
        "weights": footprint.host_weight_bytes,
        "gradients": footprint.host_gradient_bytes,
        "activations": max(step.host_bytes - footprint.host_weight_bytes - footprint.host_gradient_bytes, 0),
        "optimizer": update.host_bytes,
        "process": int(rss_gib() * GIB),
    }
    if not has_gpu:
        host["device"] = sum(device.values())
    # Weights that were updated on the device are copied to the host.
    last = step.phases[-1]
    phases = (*step.phases[:-1], replace(last, d2h_bytes=last.d2h_bytes + update.placed_gradient_bytes))
    dry_run_ms = timed.step_ms if timed and config.microbatches <= MOST_DRY else None
    return RunPlan(
        device_bytes=device,
        host_bytes=host,
        logits_bytes=logits_bytes(components),
        pinned_bytes=step.host_bytes if has_gpu and config.offload.get("pin", "auto") != "off" else 0,
        step_bytes={
            "in": sum(phase.h2d_bytes for phase in phases),
            "out": sum(phase.d2h_bytes for phase in phases),
            "activations in": step.total("activation_h2d_bytes"),
            "activations out": step.total("activation_d2h_bytes"),
        },
        forecast=forecast(
            phases,
            machine.bandwidth,
            machine.flops_per_s(components.dtype),
            update.time(components, machine, has_gpu),
            dry_run_ms,
        ),
        budgets={
            "vram_budget": vram_budget,
            "host_budget": _budget("host_budget", config.host_budget, machine.host_gib),
        },
        machine=machine,
        has_gpu=has_gpu,
        timeline=tuple(timed.work) if timed else (),
    )


def logits_bytes(components: Components) -> int:
    """Returns the bytes of the logits that exist at once, in float32: as many tokens as the head computes at a time."""
    config = components.config
    heads = [module for module in components.model.modules() if isinstance(module, Head)]
    tokens = -(-config.batch_size // config.microbatches) * config.seq_len
    return max((4 * tokens_per_chunk(tokens, head.out_features) * head.out_features for head in heads), default=0)


def _budget(key: str, value: str | int | None, all_gib: float | None) -> int | None:
    """Returns the bytes asked for, or all that the machine has if these are fewer; None if neither is known."""
    asked = [] if value is None else [parse_bytes(key, value)]
    available = [] if all_gib is None else [int(all_gib * GIB)]
    return min(asked + available, default=None)
