"""The plan of a run: what it will hold and move, how long a step will take and why, and whether it fits.

Nothing large is allocated and no GPU is needed: a dry run of the step on the meta device (`offload.planning.dry_run`)
counts bytes, and times follow from the figures of a machine (`training.planning.machine`).
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig
from torch import Tensor, nn

from models.loss import Head, tokens_per_chunk
from offload.planning.cost_model import forecast, hidden_share
from offload.planning.dry_run import DryRun, Phase, dry_run
from offload.planning.simulated_streams import SimulatedStreams
from offload.runtime.byte_sizes import GIB, parse_bytes
from offload.weights.footprint import Footprint
from training.components import DTYPES, build_mode, build_model, recomputed_blocks, updates_early
from training.errors import UserError, first_line
from training.metrics.files import write_summary
from training.metrics.progress import print_plan
from training.planning.machine import Figures, figures_of, is_whole
from training.planning.optimizer import PlannedUpdate
from training.planning.report import RunPlan
from training.profiling.hardware import resolve_device, rss_gib
from training.profiling.timeline import Interval, Timeline, draw_chart

# Microbatches that are rehearsed one by one; more follow from these.
REHEARSED = 4

TIMELINE_FILE = "plan_timeline.png"

NO_GPU = "no GPU here: the CPU is planned for; hardware=h200, a100 or rtx4090 plans for one"

WAITS_FOR_UPDATES = "optimizer=host_adamw hides updates on the host behind the step, most of all with clip_norm=null"

logger = logging.getLogger(__name__)


def plan_only(config: DictConfig, run_dir: Path) -> dict:
    """All that `plan=true` does: the plan on the terminal, in plan.json, and as a summary, which is returned.

    Its status is "planned", its reason what does not fit. Raises UserError as a run would.
    """
    figures = figures_of(config, resolve_device("auto" if is_whole(config) else config.device))
    plan = plan_run(config, figures, has_gpu=figures.vram_gib is not None)
    if not plan.has_gpu:
        plan = replace(plan, notes=(*plan.notes, NO_GPU))
    choices = HydraConfig.get().runtime.choices
    print_plan(plan.rows(), title=f"Footprint: offload={choices['offload']} model={choices['model']}")
    plan.write(run_dir)
    if plan.timeline:
        title = f"planned: {choices['offload']}, {choices['model']} on {figures.name}"
        draw_timeline(plan, config.microbatches, run_dir / TIMELINE_FILE, title)
    summary = {"status": "planned", "reason": plan.misfit(), **plan.summary()}
    write_summary(run_dir, summary)
    return summary


def draw_timeline(plan: RunPlan, microbatches: int, path: Path, title: str) -> None:
    """Forward and backward as they were rehearsed, as a picture; its title says that the step is longer, and how long.

    Of many `microbatches` a few are rehearsed.
    """
    intervals = (Interval(work.lane, work.start_ms * 1e3, work.end_ms * 1e3) for work in plan.timeline)
    ordered = tuple(sorted(intervals, key=lambda interval: interval.start_us))
    some = f" of some of {microbatches} microbatches" if microbatches > REHEARSED else ""
    part = f"step of {plan.forecast.step_ms:,.1f} ms, of it forward and backward{some}"
    draw_chart(Timeline(ordered, overlaps=True), path, f"{title}; {part}")


def plan_run(config: DictConfig, figures: Figures, has_gpu: bool) -> RunPlan:
    """The plan of the run that `config` describes, on the machine of `figures`.

    Where the model cannot be rehearsed without values, activations are not in it, and a note says why.
    Raises UserError for a configuration that a run would refuse for its model or its mode.
    """
    dtype = DTYPES[config.precision]
    model = build_model(config, dtype)
    mode, plan = build_mode(config, model)
    recomputed_blocks(config, model, mode)
    notes = []
    rehearsal = None
    timed = SimulatedStreams(torch.device("meta"), figures.bandwidth, figures.flops_per_s(dtype)) if has_gpu else None
    try:
        rehearsal = rehearsed(config, plan, has_gpu, timed)
    except UserError:
        raise
    except Exception as error:  # whatever a model does to values that are not there; a run has them
        logger.debug("no rehearsal", exc_info=error)
        notes.append(f"activations are not in the plan: this model needs values to run ({first_line(error)})")
    if rehearsal is None:
        # What was timed ends where the rehearsal did.
        rehearsal, timed = _unrehearsed(config, plan, model), None
    if plan.activation_budget_bytes is None:
        share = hidden_share(rehearsal.phases, figures.bandwidth, figures.flops_per_s(dtype))
        rehearsal = rehearsal.swapping(share)
        notes.append(f"offload.budget=auto: {share:.0%} of the activations taken to be hidden behind compute")
        # It swaps everything, as the rehearsal did.
        timed = None
    found = _assembled(config, figures, has_gpu, model, plan, rehearsal, timed)
    if has_gpu and plan.units and found.forecast.bound == "host optimizer" and "device_share" not in config.optimizer:
        notes.append(WAITS_FOR_UPDATES)
    return replace(found, notes=tuple(notes))


def rehearsed(config: DictConfig, plan: Footprint, has_gpu: bool, timed: SimulatedStreams | None = None) -> DryRun:
    """A rehearsed step of `config`, as far as it is rehearsed on the streams `timed`."""
    count = config.microbatches
    small, larger = divmod(config.batch_size, count)
    # As tensor_split makes them.
    sizes = [small + 1] * larger + [small] * (count - larger)
    if count <= REHEARSED:
        return _rehearsed(config, sizes, has_gpu, timed)
    if plan.layer_major:
        before = _rehearsed(config, sizes[: REHEARSED - 1], has_gpu)
        after = _rehearsed(config, sizes[:REHEARSED], has_gpu, timed)
        return before.continued(after, sum(sizes[REHEARSED:]) / sizes[REHEARSED - 1])
    # The first one's gradients need not come back to be added to; of the others those of a size are alike.
    others = Counter(sizes[1:])
    return _rehearsed(config, [sizes[0], *others], has_gpu, timed).repeated([1, *others.values()])


def _rehearsed(
    config: DictConfig, sizes: Sequence[int], has_gpu: bool, timed: SimulatedStreams | None = None
) -> DryRun:
    """With microbatches of so many sequences, on a model of its own."""
    model = build_model(config, DTYPES[config.precision])
    model.train()
    mode, _ = build_mode(config, model)
    parts = [torch.empty((size, config.seq_len + 1), dtype=torch.int64, device="meta") for size in sizes]

    def loss_of(tokens: Tensor) -> Tensor:
        return model(tokens[:, :-1], tokens[:, 1:]) * (len(tokens) / config.batch_size)

    losses = [partial(loss_of, tokens) for tokens in parts]
    blocks = recomputed_blocks(config, model, mode)
    return dry_run(mode, model, losses, recomputed=blocks, norms=True, timed=timed, on_gpu=has_gpu)


def _unrehearsed(config: DictConfig, plan: Footprint, model: nn.Module) -> DryRun:
    """What the mode says by itself: bounds, without activations, as two phases."""
    traffic = plan.for_microbatches(config.microbatches)
    flops = model.flops_per_token(config.seq_len) * config.seq_len * config.batch_size
    weights_in = min(plan.host_weight_bytes, traffic.h2d_bytes)
    phases = (
        Phase(True, flops / 3, weights_in, 0, 0, 0),
        Phase(False, flops * 2 / 3, traffic.h2d_bytes - weights_in, traffic.d2h_bytes, 0, 0),
    )
    gradients = sum(tensor.nbytes for tensor in plan.resident if tensor.requires_grad)
    host = plan.host_weight_bytes + plan.host_gradient_bytes
    return DryRun(phases, plan.slot_bytes, plan.slot_bytes + gradients, gradients, 0, host)


def _assembled(
    config: DictConfig,
    figures: Figures,
    has_gpu: bool,
    model: nn.Module,
    plan: Footprint,
    rehearsal: DryRun,
    timed: SimulatedStreams | None,
) -> RunPlan:
    vram_budget = _budget("vram_budget", config.vram_budget, figures.vram_gib) if has_gpu else None
    device = {
        "weights": plan.resident_bytes,
        "slots": rehearsal.slot_bytes,
        "gradients": rehearsal.peak_gradient_bytes,
        "activations": rehearsal.activation_bytes,
    }
    update = PlannedUpdate.of(config, plan, spare_bytes=(vram_budget or 0) - sum(device.values()))
    device["optimizer"] = update.device_bytes
    if not updates_early(config):
        # Else they go as soon as they are used, while backward still frees what forward saved.
        device["gradients"] += update.placed_gradient_bytes
    host = {
        "weights": plan.host_weight_bytes,
        "gradients": plan.host_gradient_bytes,
        "activations": max(rehearsal.host_bytes - plan.host_weight_bytes - plan.host_gradient_bytes, 0),
        "optimizer": update.host_bytes,
        "process": int(rss_gib() * GIB),
    }
    if not has_gpu:
        host["device"] = sum(device.values())
    # New weights of what is updated on the device go home from there.
    last = rehearsal.phases[-1]
    phases = (*rehearsal.phases[:-1], replace(last, d2h_bytes=last.d2h_bytes + update.placed_gradient_bytes))
    time = update.time(config, figures, has_gpu, streams=bool(plan.units))
    flops_per_s = figures.flops_per_s(DTYPES[config.precision])
    rehearsed_ms = timed.step_ms if timed and config.microbatches <= REHEARSED else None
    return RunPlan(
        device_bytes=device,
        host_bytes=host,
        logits_bytes=logits_bytes(model, config),
        pinned_bytes=rehearsal.host_bytes if has_gpu and config.offload.get("pin", "auto") != "off" else 0,
        step_bytes={
            "in": sum(phase.h2d_bytes for phase in phases),
            "out": sum(phase.d2h_bytes for phase in phases),
            "activations in": rehearsal.total("activation_h2d_bytes"),
            "activations out": rehearsal.total("activation_d2h_bytes"),
        },
        forecast=forecast(phases, figures.bandwidth, flops_per_s, time, rehearsed_ms),
        budgets={
            "vram_budget": vram_budget,
            "host_budget": _budget("host_budget", config.host_budget, figures.host_gib),
        },
        figures=figures,
        has_gpu=has_gpu,
        timeline=tuple(timed.work) if timed else (),
    )


def logits_bytes(model: nn.Module, config: DictConfig) -> int:
    """The logits that exist at once, part of the activations: float32, for as many tokens as the head takes at once."""
    heads = [module for module in model.modules() if isinstance(module, Head)]
    tokens = -(-config.batch_size // config.microbatches) * config.seq_len
    return max((4 * tokens_per_chunk(tokens, head.out_features) * head.out_features for head in heads), default=0)


def _budget(key: str, value: str | int | None, all_gib: float | None) -> int | None:
    """The bytes asked for, or all that the machine has where these are fewer; None where neither is known."""
    asked = [] if value is None else [parse_bytes(key, value)]
    there = [] if all_gib is None else [int(all_gib * GIB)]
    return min(asked + there, default=None)
