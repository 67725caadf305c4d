"""Plans the forwards beside a run's steps, which run on the meta device: of samples, and of the reference of task=dpo.

A sample is made between steps, when no activations of a step are there, so a plan counts what a sample takes beyond
these. The forwards of a reference are in no time of a step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from models.generation import largest_forwards
from offload import GIB, format_bytes
from offload.planning import Bandwidth, SimulatedStreams, dry_run_forwards
from training.evaluation.held_out import evaluating
from training.planning.dry_step import examples_of_microbatch, refuse_sample_shape
from training.planning.fit import MisfitError, limits_below, shortfalls
from training.planning.machine import Machine
from training.profiling.hardware import rss_gib
from training.settle.components import Components
from training.tasks.dpo import answer_log_probs

logger = logging.getLogger(__name__)


def sample_bytes(components: Components, has_gpu: bool) -> int:
    """Returns the bytes that a sample takes on the device besides weights and slots; 0 if the run makes none."""
    if components.config.sample.every is None:
        return 0
    return _bytes_of(components, components.task.sample_forwards(components.config, components.model), has_gpu)


def refuse_text(components: Components, positions: int) -> None:
    """Raises MisfitError if a text of `positions` tokens has no room beside the weights; with force=true it warns."""
    footprint, has_gpu = components.footprint, components.device.type == "cuda"
    text = _bytes_of(components, largest_forwards(components.model, positions), has_gpu)
    device = footprint.resident_bytes + footprint.slot_bytes + text
    host = footprint.host_home_bytes + footprint.ring_bytes + int(rss_gib() * GIB)
    totals = {"vram_budget": device, "host_budget": host} if has_gpu else {"host_budget": host + device}
    limits = limits_below(components, totals, totals)
    if not limits:
        return
    found = (
        f"a text of {positions:,} tokens does not fit, its keys, values and activations take {format_bytes(text)}:"
        f" {shortfalls(totals, limits)}"
    )
    if components.config.force:
        logger.warning("force=true makes it: %s", found)
        return
    raise MisfitError(f"{found}: take fewer --tokens, or a mode that leaves more room, such as offload=layer_stream")


def _bytes_of(components: Components, forwards: Sequence[Callable[[], object]], has_gpu: bool) -> int:
    """Returns the peak of `forwards`; 0 without any, and where the model needs values to run."""
    if not forwards or components.mode.foreign:
        return 0
    timed = SimulatedStreams(torch.device("meta"), Bandwidth(1, 1, 1), 1.0)
    mode, model = components.mode, components.model
    try:
        with evaluating(model):
            return dry_run_forwards(mode, model, forwards, timed=timed, on_gpu=has_gpu).peak_bytes
    # A model may fail in any way on tensors without values, and yet run on real ones.
    except Exception as error:
        refuse_sample_shape(components)
        logger.debug("no dry run of a sample", exc_info=error)
        return 0


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
    timed = machine.simulated(components.dtype)
    part = task.meta_batch(components.config, rows)
    try:
        with evaluating(model):
            forwards = [lambda: answer_log_probs(model, part)] * 2
            return dry_run_forwards(mode, model, forwards, timed=timed, on_gpu=has_gpu).ms / 2
    # A model may fail in any way on tensors without values, and yet run on real ones.
    except Exception as error:
        logger.debug("no dry run of the reference", exc_info=error)
        return None
