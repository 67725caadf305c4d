"""Refuses a run that does not fit, before anything large is allocated, and explains one that runs out of memory later.

force=true starts a run that does not fit. A run is held to the budgets that were given, and to the memory of the
machine it runs on, whatever machine `hardware` plans for. Budgets are exact. The machine's own memory counts so:

- on the GPU, all of it. The plan may be 1% too high (docs/measurements.md), so a run is refused only beyond that.
  Activations that offload.budget=auto would keep are left out: the run keeps what there is room for.
- on the host, what this process holds and what is available to it now, with cached files and within the limits of its
  control group. Other programs do not give theirs back. A run is refused only 5% beyond that: on a CPU the device's
  part is an estimate, and measured peaks were higher than planned ones, not lower.

Limits on page-locking refuse nothing: copies fall back to pageable memory.
"""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from models.generation import largest_forwards
from offload.knobs import GIB, format_bytes, parse_bytes
from offload.planning import free_host_bytes
from training.errors import UserError
from training.metrics.progress import print_plan
from training.planning.advice import Exceeded, memory_advice
from training.planning.dry_step import peak_of
from training.planning.memory import UNDO_LOG
from training.planning.notes import squares_note
from training.planning.report import Limit, RunPlan
from training.profiling.hardware import rss_gib, vram_bytes
from training.runs import starting
from training.runs.failures import is_device_memory, is_host_memory, requested
from training.settle.components import Components

# The share by which a plan may exceed the machine's own memory: its error.
TOLERANCE = {"vram_budget": 0.01, "host_budget": 0.05}
# The share of what was planned that a run is advised to take after it ran out of memory.
FAILED_SHARE = 0.9

logger = logging.getLogger(__name__)


class MisfitError(UserError):
    """The run needs more memory than it may take."""

    status = "refused"


class OutOfMemoryError(UserError):
    """The GPU or the host has too little memory for the run."""

    status = "out_of_memory"


def refuse_misfit(components: Components, plan: RunPlan) -> None:
    """Raises MisfitError if the run does not fit, below its plan; with force=true it warns in one line instead."""
    limits, before = exceeded(components, plan), {}
    if plan.encoding is not None:
        totals = {key: total for key, total in plan.encoding.totals.items() if plan.has_gpu or key != "vram_budget"}
        before = limits_below(components, totals, totals)
    if not limits and not before:
        return
    if components.config.force:
        found = [shortfalls(plan.totals, limits)] if limits else []
        found += [f"encoding: {shortfalls(plan.encoding.totals, before)}"] if before else []
        logger.warning("force=true starts a run that does not fit: %s", "; ".join(found))
        return
    print_plan(plan.rows(), title=f"Plan: {components.invocation.title} on {components.device}")
    reason = misfit(components, plan, exceeded, before)
    raise MisfitError(f"the run does not fit: {reason}; force=true starts it anyway")


def misfit(components: Components, plan: RunPlan, exceeded: Exceeded, before: Mapping[str, Limit]) -> str | None:
    """Returns one line on the limits that the plan exceeds, with the key, both sizes and what to change; or None.

    `exceeded` gives those of the steps, `before` are those of the encoding before them.
    """
    short, encoding = exceeded(components, plan), plan.encoding
    lines = []
    if short:
        needed = f"{shortfalls(plan.totals, short)}{_of_squares(components, plan)}"
        lines.append(f"{needed}: take {memory_advice(components, plan, exceeded)}")
    lines += [
        f"encoding: {shortfalls(encoding.totals, {key: limit})}: take {encoding.advice(key)}"
        for key, limit in (before.items() if encoding is not None else ())
        if encoding.totals[key] > limit.nbytes
    ]
    return "; ".join(lines) or None


def exceeded(components: Components, plan: RunPlan) -> dict[str, Limit]:
    """Returns the limits of this machine and of the configuration that a run would exceed, by the key of the budget."""
    if components.mode.foreign:
        # Nobody knows what it will take.
        return {}
    totals = {key: total for key, total in plan.totals.items() if plan.has_gpu or key != "vram_budget"}
    # A run makes do without these.
    spared = {"vram_budget": plan.kept_bytes, "host_budget": plan.host_bytes.get(UNDO_LOG, 0)}
    return limits_below(components, totals, {key: total - spared.get(key, 0) for key, total in totals.items()})


def limits_below(components: Components, totals: Mapping[str, int], least: Mapping[str, int]) -> dict[str, Limit]:
    """Returns the limits below the bytes that are needed, by the key of the budget.

    Budgets that were given are held against `totals`, this machine's own memory against `least`.
    """
    config, own, found = components.config, own_memory(components.device, "vram_budget" in totals), {}
    for key, total in totals.items():
        if config[key] is not None and total > (given := parse_bytes(key, config[key])):
            found[key] = Limit(given, key)
        elif key in own and least[key] > own[key].nbytes * (1 + TOLERANCE[key]):
            found[key] = own[key]
    return found


def own_memory(device: torch.device, has_gpu: bool) -> dict[str, Limit]:
    """Returns the memory of this machine that a run can have, as far as it is known."""
    found = {}
    if has_gpu:
        found["vram_budget"] = Limit(vram_bytes(device), "all of the GPU's")
    if (free := free_host_bytes()) is not None:
        found["host_budget"] = Limit(free + int(rss_gib() * GIB), "free now, and this process's own")
    return found


def shortfalls(totals: Mapping[str, int], limits: Mapping[str, Limit]) -> str:
    """Returns in words what is needed and what is available, for each of `limits`."""
    return "; ".join(f"{key}: {format_bytes(totals[key])} needed, {limit} available" for key, limit in limits.items())


def refuse_text(components: Components, positions: int) -> None:
    """Raises MisfitError if a text of `positions` tokens has no room beside the weights; with force=true it warns."""
    footprint, has_gpu = components.footprint, components.device.type == "cuda"
    text = peak_of(components, largest_forwards(components.model, positions), has_gpu)
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


@contextmanager
def memory_explained(components: Components, plan: RunPlan) -> Iterator[None]:
    """Turns an error of the block because of too little memory into one with the plan's numbers and advice."""
    try:
        yield
    except Exception as error:
        if is_device_memory(error):
            found = f"the GPU is out of memory{requested(error)}"
            setting = "" if starting.segments_expand() else f"; {starting.ALLOCATOR_ADVICE}"
            raise OutOfMemoryError(f"{found}: {_explained(components, plan, 'vram_budget')}{setting}") from error
        if is_host_memory(error):
            # The engine's own errors tell both sizes.
            sizes = f" ({error})" if isinstance(error, MemoryError) and str(error) else ""
            found = f"the host is out of memory{sizes}"
            raise OutOfMemoryError(f"{found}: {_explained(components, plan, 'host_budget')}") from error
        raise


def _explained(components: Components, plan: RunPlan, key: str) -> str:
    total, budget = plan.totals[key], plan.budgets[key]
    by_part = plan.device_bytes if key == "vram_budget" else plan.host_bytes
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in by_part.items() if nbytes)
    limit = f" of {format_bytes(budget)}" if budget is not None else ""
    # What was planned was too much.
    less = Limit(int(FAILED_SHARE * min(total, budget or total)), "after the failure")

    def exceeded(_: Components, plan: RunPlan) -> dict[str, Limit]:
        return plan.exceeded() | ({key: less} if plan.totals[key] > less.nbytes else {})

    planned = f"planned were {format_bytes(total)}{limit} ({parts}){_of_squares(components, plan)}"
    return f"{planned}: take {memory_advice(components, plan, exceeded)}"


def _of_squares(components: Components, plan: RunPlan) -> str:
    squares = squares_note(components, plan.square_bytes)
    return f" ({squares})" if squares else ""
