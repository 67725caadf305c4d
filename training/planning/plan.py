"""Plans a run: the bytes that it will hold and move, the time of a step and its bottleneck, and whether it fits.

Nothing large is allocated and no GPU is needed. A dry run of the step on the meta device (`offload.planning.dry_run`)
counts bytes, and times follow from the speeds of a machine (`training.planning.machine`).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn

from models.loss import Head, tokens_per_chunk
from offload import GIB, parse_bytes
from offload.planning import (
    DryRun,
    NotFinalError,
    Phase,
    SimulatedStreams,
    UpdateTimes,
    floor_ms,
    forecast,
    hidden_share,
    update_work,
)
from training.components import Components
from training.errors import UserError, first_line
from training.mapped_weights import mapped_note
from training.metrics.files import write_summary
from training.metrics.progress import phase, print_plan
from training.model_weights import ModelWeights
from training.parallel.buckets import exchange_bytes
from training.parallel.world import ranks_of_host
from training.planning.budget import resident_key, resident_units, with_resident
from training.planning.chosen import chosen_values
from training.planning.disk import with_reads
from training.planning.dry_step import MOST_DRY, dry_step, examples_of_rank, without_dry_run
from training.planning.fit import misfit
from training.planning.gradients import UNSEEN, with_gradients_chosen
from training.planning.machine import Machine, is_complete, machine_of
from training.planning.optimizer import PlannedUpdate
from training.planning.quantised import unquantised_note
from training.planning.ranks import bytes_of_ranks, note_of_ranks, summed_after_backward
from training.planning.report import RunPlan
from training.planning.samples import sample_bytes
from training.planning.shapes import refuse_shapes
from training.planning.speculation import log_share, with_log
from training.planning.streamed import staying_note, streamed_share
from training.profiling.hardware import datasheet_flops, resolve_device, rss_gib
from training.profiling.timeline import Interval, Timeline, draw_chart
from training.runs.files import PLAN_PICTURE
from training.runs.invocation import Invocation
from training.visible_text import visible

NO_GPU = "no GPU here: the CPU is planned for; hardware=h200, a100 or rtx4090 plans for one"
WAITS_FOR_UPDATES = "optimizer=host_adamw hides updates on the host behind the step, most of all with clip_norm=null"
FOREIGN = "this system's own memory, copies and times are not planned: the plan is that of offload=none"

logger = logging.getLogger(__name__)


def plan_only(config: DictConfig, invocation: Invocation) -> dict:
    """Does all of `plan=true`: prints the plan, writes plan.json and a summary, and returns the summary.

    The summary's status is "planned"; its reason names what does not fit, and is None if everything does. Raises
    UserError as a run would.
    """
    device = resolve_device("auto" if is_complete(config) else config.device)
    on_gpu = config.hardware.vram_gib is not None or device.type == "cuda"
    components = Components.of(config, invocation, device, on_gpu=on_gpu)
    if config.model.weights is not None:
        # A plan needs no weights, and sends no request for them.
        ModelWeights.find(config.model.weights, ask=False)
    with phase("measuring the machine"):
        machine = machine_of(components)
    with phase("planning"):
        _, plan = plan_filled(components, machine, has_gpu=machine.vram_gib is not None)
    if not plan.has_gpu:
        plan = replace(plan, notes=(*plan.notes, NO_GPU))
    print_plan(plan.rows(), title=f"Plan: {invocation.title}")
    plan.write(invocation.run_dir)
    if plan.timeline:
        title = f"planned: {invocation.choices['offload']}, {invocation.choices['model']} on {machine.name}"
        picture = invocation.run_dir / PLAN_PICTURE
        draw_timeline(plan, config.microbatches, picture, title)
        print(f"picture {visible(picture)}")
    summary = {"status": "planned", "reason": misfit(components, plan, plan.limits()), **plan.summary()}
    write_summary(invocation.run_dir, summary)
    return summary


def plan_filled(components: Components, machine: Machine, has_gpu: bool) -> tuple[Components, RunPlan]:
    """Plans the run; where offload.resident=auto, as many units stay on the device as pay within a vram_budget.

    Writes their number into the configuration, 0 without a budget. Returns the components with that mode, which may
    keep gradients after all. Raises UserError for a release of gradients that was asked for and cannot be.
    """
    return with_gradients_chosen(components, lambda some: _plan_filled(some, machine, has_gpu))


def _plan_filled(components: Components, machine: Machine, has_gpu: bool) -> tuple[Components, RunPlan]:
    config, key = components.config, resident_key(components.config)
    if key is None:
        plan = plan_run(components, machine, has_gpu)
        return components, replace(plan, chosen=chosen_values(components, None))
    # In `components` no unit stays.
    streamed = PlannedStep.of(components, machine, has_gpu)
    units = 0
    if has_gpu and config.vram_budget is not None:
        budget_bytes = _budget("vram_budget", config.vram_budget, machine.vram_gib)
        units = resident_units(components, machine, streamed.run, budget_bytes)
    while units:
        filled = with_resident(components, key, units)
        plan = plan_run(filled, machine, has_gpu)
        if plan.fits["vram_budget"]:
            break
        # The search takes activations to be the same whatever stays.
        units = units * 9 // 10
    else:
        filled, plan = components, _plan_of(streamed, components, machine, has_gpu)
    OmegaConf.update(config, key, units)
    filled = replace(filled, config=config)
    return filled, replace(plan, chosen=chosen_values(filled, key))


def draw_timeline(plan: RunPlan, microbatches: int, path: Path, title: str) -> None:
    """Draws forward and backward of the dry run and the optimizer's update.

    Of more than `MOST_DRY` microbatches only the first are drawn; the title then has the length of the whole step too.
    """
    intervals = (Interval(work.lane, work.start_ms * 1e3, work.end_ms * 1e3) for work in plan.timeline)
    ordered = tuple(sorted(intervals, key=lambda interval: interval.start_us))
    timeline, step_ms = Timeline(ordered, overlaps=True), plan.forecast.step_ms
    drawn = f"the first {MOST_DRY} of {microbatches} microbatches" if microbatches > MOST_DRY else "without waits"
    whole = timeline.end_us / 1e3 > 0.99 * step_ms
    draw_chart(timeline, path, f"{title}; step" if whole else f"{title}; step of {step_ms:,.1f} ms, {drawn}")


@dataclass(frozen=True)
class PlannedStep:
    """A step that ran on the meta device, with the streams that timed it.

    If the model cannot run without values, `run` has the bounds of the mode's footprint, and `notes` say so.
    """

    run: DryRun
    timed: SimulatedStreams | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, components: Components, machine: Machine, has_gpu: bool) -> PlannedStep:
        flops_per_s = machine.flops_per_s(components.dtype)
        speeds = machine.bandwidth, flops_per_s, machine.device_gb_s, machine.exchange_gb_s
        timed = SimulatedStreams(torch.device("meta"), *speeds) if has_gpu else None
        try:
            return cls(dry_step(components, has_gpu, timed), timed)
        except (UserError, NotFinalError):
            raise
        except Exception as error:  # a model may fail in any way on tensors without values, and yet run on real ones
            refuse_shapes(components)
            logger.debug("no dry run", exc_info=error)
            if components.gradients.released and components.gradients.why is not None:
                raise NotFinalError(UNSEEN, first_line(error)) from error
            note = f"activations are not in the plan: this model needs values to run ({first_line(error)})"
            # The timeline ends where the dry run failed, so it is of no use.
            return cls(without_dry_run(components), None, (note,))


def plan_run(components: Components, machine: Machine, has_gpu: bool) -> RunPlan:
    """Plans the run that `components` make up, on `machine`; leaves the components as they were."""
    return _plan_of(PlannedStep.of(components, machine, has_gpu), components, machine, has_gpu)


def _plan_of(planned: PlannedStep, components: Components, machine: Machine, has_gpu: bool) -> RunPlan:
    footprint, flops_per_s = components.footprint, machine.flops_per_s(components.dtype)
    step, timed, notes, kept_bytes = planned.run, planned.timed, list(planned.notes), 0
    if footprint.activation_budget_bytes is None:
        share = hidden_share(step.phases, machine.bandwidth, flops_per_s, machine.device_gb_s)
        everything, step = step, step.swapping(share)
        kept_bytes = step.peak_bytes - everything.peak_bytes
        notes.append(f"offload.budget=auto: {share:.0%} of the activations taken to be hidden behind compute")
        # The timeline is that of the dry run, which swaps everything.
        timed = None
    plan = _assembled(components, machine, has_gpu, step, timed)
    waits = plan.forecast.bound == "host optimizer" and not components.updates_overlap
    if has_gpu and footprint.units and waits:
        notes.append(WAITS_FOR_UPDATES)
    if (note := note_of_ranks(components)) is not None:
        notes.append(note)
    if components.mode.foreign:
        notes.append(FOREIGN)
    if staying := staying_note(components):
        notes.append(staying)
    if left := unquantised_note(components):
        notes.append(left)
    return replace(plan, kept_bytes=kept_bytes, streamed=streamed_share(components), notes=(*plan.notes, *notes))


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
        # Between steps, whose activations are gone by then.
        "samples": max(sample_bytes(components, has_gpu) - step.activation_bytes, 0),
    }
    # Without a budget that was asked for, a mode keeps nothing on the device that it would move.
    fillable = vram_budget if config.vram_budget is not None and has_gpu else 0
    update = PlannedUpdate.of(components, spare_bytes=fillable - sum(device.values()))
    device["optimizer"] = update.device_bytes
    if config.devices > 1:
        # After backward, whose activations are gone by then.
        device["exchange"] = max(exchange_bytes(summed_after_backward(components)) - step.activation_bytes, 0)
    if not components.updates_begin_early:
        # Early updates free these gradients while backward still frees activations, so they add nothing to the peak.
        device["gradients"] += update.placed_gradient_bytes
    host = {
        "weights": footprint.host_home_bytes,
        **({"read ahead": footprint.ring_bytes} if footprint.ring_bytes else {}),
        "gradients": footprint.host_gradient_bytes,
        "activations": max(
            step.host_bytes - footprint.host_home_bytes - footprint.ring_bytes - footprint.host_gradient_bytes, 0
        ),
        "optimizer": update.host_bytes,
        "process": int(rss_gib() * GIB),
    }
    host |= {} if has_gpu else {"device": sum(device.values())}
    host = with_log(bytes_of_ranks(host, components), components, update, machine)
    # Weights that were updated on the device are copied to the host, besides their gradients or instead of them.
    last, new_weights = step.phases[-1], 0 if components.gradients.released else update.placed_gradient_bytes
    phases = (*step.phases[:-1], replace(last, d2h_bytes=last.d2h_bytes + new_weights))
    times = update.time(components, machine, has_gpu, log_share(host, update))
    flops_per_s = machine.flops_per_s(components.dtype)
    rates = machine.device_gb_s, machine.exchange_gb_s
    simulated_ms = _simulated_ms(components, machine, phases, timed)
    expected = forecast(phases, machine.bandwidth, flops_per_s, times, simulated_ms, *rates)
    notes = []
    if footprint.file_bytes:
        weights_in = sum(phase.h2d_bytes - phase.activation_h2d_bytes for phase in phases)
        read_bytes = weights_in * footprint.file_bytes / footprint.host_weight_bytes
        room = machine.host_gib * GIB - sum(host.values())
        expected, note = with_reads(expected, read_bytes, footprint.file_bytes, room, machine.disk_gb_s)
        notes = [mapped_note(config, components.model, footprint), note]
    everything, trained = parameter_counts(components.model)
    return RunPlan(
        device_bytes=device,
        host_bytes=host,
        logits_bytes=logits_bytes(components),
        pinned_bytes=step.host_bytes * ranks_of_host(config)
        if has_gpu and config.offload.get("pin", "auto") != "off"
        else 0,
        step_bytes={
            "in": sum(phase.h2d_bytes for phase in phases),
            "out": sum(phase.d2h_bytes for phase in phases),
            "activations in": step.total("activation_h2d_bytes"),
            "activations out": step.total("activation_d2h_bytes"),
        },
        forecast=expected,
        model_flops=components.task.flops(components.model, config)
        or _model_flops(phases, trained / everything) * config.devices,
        floor_ms=_floor_ms(machine, components.dtype, phases) if has_gpu else None,
        budgets={
            "vram_budget": vram_budget,
            "host_budget": _budget("host_budget", config.host_budget, machine.host_gib),
        },
        machine=machine,
        has_gpu=has_gpu,
        parameters=everything,
        trained_parameters=trained,
        notes=tuple(notes),
        timeline=(*timed.work, *update_work(times, expected.phases_ms, timed.step_ms)) if timed else (),
    )


def parameter_counts(model: nn.Module) -> tuple[int, int]:
    """Returns how many numbers the parameters of `model` are, and how many of these train; tied ones count once."""
    parameters = list(model.parameters())
    return sum(p.numel() for p in parameters), sum(p.numel() for p in parameters if p.requires_grad)


def _model_flops(phases: Sequence[Phase], trained_share: float) -> float:
    """Returns the FLOPs of a step without recomputation.

    Backward has those of forward for the gradients of activations, and as many for those of weights, where they train.
    """
    return (2 + trained_share) * sum(phase.flops for phase in phases if phase.forward)


def _floor_ms(machine: Machine, dtype: torch.dtype, phases: Sequence[Phase]) -> float | None:
    bytes_in, bytes_out, flops = (
        sum(getattr(phase, name) for phase in phases) for name in ("h2d_bytes", "d2h_bytes", "flops")
    )
    return floor_ms(machine.bandwidth, bytes_in, bytes_out, flops, datasheet_flops(machine.name, dtype))


def _simulated_ms(
    components: Components, machine: Machine, phases: Sequence[Phase], timed: SimulatedStreams | None
) -> float | None:
    """Returns the time of forward and backward in the dry run, or None if it was not timed.

    Of more microbatches than it ran, those that it ran tell by how much a step is longer than its phases.
    """
    if timed is None or components.config.microbatches <= MOST_DRY:
        return timed and timed.step_ms
    if components.footprint.layer_major:
        return None
    speeds = machine.bandwidth, machine.flops_per_s(components.dtype)
    rates = {"device_gb_s": machine.device_gb_s, "links_gb_s": machine.exchange_gb_s}
    every = forecast(phases, *speeds, UpdateTimes(), **rates).phases_ms
    # Each microbatch has two phases. Of those after the first, the dry run has one of each size.
    sizes = examples_of_rank(components.config) % components.config.microbatches
    dry = every[:4] if sizes in (0, 1) else ()
    return timed.step_ms / sum(dry) * sum(every) if dry else None


def logits_bytes(components: Components) -> int:
    """Returns the bytes of the logits that exist at once, in float32: as many tokens as the head computes at a time."""
    config = components.config
    heads = [module for module in components.model.modules() if isinstance(module, Head)]
    tokens = -(-examples_of_rank(config) // config.microbatches) * config.seq_len
    return max((4 * tokens_per_chunk(tokens, head.out_features) * head.out_features for head in heads), default=0)


def _budget(key: str, value: str | int | None, all_gib: float | None) -> int | None:
    """Returns the bytes asked for, or all that the machine has if these are fewer; None if neither is known."""
    asked = [] if value is None else [parse_bytes(key, value)]
    available = [] if all_gib is None else [int(all_gib * GIB)]
    return min(asked + available, default=None)
