"""The note of a plan about the reference of task=dpo, whose forwards are in no time of a step."""

from __future__ import annotations

import logging

import torch

from offload.planning import SimulatedStreams, dry_run_forwards
from training.evaluation.held_out import evaluating
from training.planning.dry_step import examples_of_microbatch
from training.planning.machine import Machine
from training.settle.components import Components
from training.tasks.dpo import answer_log_probs

logger = logging.getLogger(__name__)


def device_bytes(components: Components) -> int:
    """Returns the bytes of the device that a second model takes; 0 without one."""
    second = components.reference
    return 0 if second is None else second.footprint.resident_bytes + second.footprint.slot_bytes


def host_bytes(components: Components) -> int:
    """Returns the bytes of a rank's host memory that a second model takes; 0 without one."""
    second = components.reference
    return 0 if second is None else second.footprint.host_home_bytes + second.footprint.ring_bytes


def reference_note(components: Components, machine: Machine, has_gpu: bool) -> str | None:
    """Tells which forwards a run makes beside its steps, and how long they take; None if the task makes none."""
    task, config = components.task, components.config
    if not (task.looks_ahead or task.needs_table):
        return None
    rows = examples_of_microbatch(config)
    ms = _forward_ms(components, machine, rows, has_gpu) if has_gpu else None
    if task.looks_ahead:
        each = "" if ms is None else f", about {ms * config.microbatches:,.0f} ms that are not in its planned time"
        by = "without the adapter" if components.reference is None else "by the copy"
        return f"task.reference={config.task.reference}: a step begins with a forward of all its pairs {by}{each}"
    # On every device at once.
    each = "" if ms is None else f", about {1000 / rows / config.devices * ms / 1e3:,.1f} s for 1,000 of the longest"
    return f"task.reference=cached: before the first step there is a forward of every pair{each}"


def _forward_ms(components: Components, machine: Machine, rows: int, has_gpu: bool) -> float | None:
    """Returns the time of a forward of a microbatch, None where the model needs values to run."""
    task = components.task
    asked = components if components.reference is None else components.reference
    mode, model = asked.mode, asked.model
    speeds = machine.bandwidth, machine.flops_per_s(components.dtype), machine.device_gb_s, machine.exchange_gb_s
    timed = SimulatedStreams(torch.device("meta"), *speeds)
    part = task.meta_batch(components.config, rows)
    try:
        with evaluating(model):
            forwards = [lambda: answer_log_probs(model, part)] * 2
            return dry_run_forwards(mode, model, forwards, timed=timed, on_gpu=has_gpu).ms / 2
    # A model may fail in any way on tensors without values, and yet run on real ones.
    except Exception as error:
        logger.debug("no dry run of the reference", exc_info=error)
        return None
