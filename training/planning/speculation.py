"""Plans the updates that may have to be undone: the host memory of their logs, and why there are none."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from offload import GIB, Speculation, parse_bytes
from training.parallel.world import ranks_of_host
from training.planning.machine import Machine
from training.planning.optimizer import PlannedUpdate
from training.planning.report import RunPlan
from training.settle.components import Components

# The name of the logs' bytes among the parts of host memory.
UNDO_LOG = "undo log"
KEY = "optimizer.speculate"


def with_log(
    host: Mapping[str, int], components: Components, update: PlannedUpdate, machine: Machine
) -> dict[str, int]:
    """Returns the bytes of host memory by part, with those of the logs: at most what the other parts leave."""
    if not components.speculates:
        return dict(host)
    asked = components.config.host_budget
    limits = [] if asked is None else [parse_bytes("host_budget", asked)]
    limits += [] if machine.host_gib is None else [int(machine.host_gib * GIB)]
    room = max(min(limits) - sum(host.values()), 0) if limits else update.log_bytes
    return {**host, UNDO_LOG: min(update.log_bytes, room)}


def log_share(host: Mapping[str, int], update: PlannedUpdate) -> float:
    """Returns the share of the host's updates, 0 to 1, for which the planned memory has a log."""
    return host.get(UNDO_LOG, 0) / update.log_bytes if update.log_bytes else 0.0


def planned_speculation(components: Components, plan: RunPlan) -> Speculation | None:
    """Returns what the mode is told of updates that may have to be undone; None where there are none.

    The ranks that share the homes have equal parts of the memory for logs, and all are told the same.
    """
    ranks = ranks_of_host(components.config) if components.shares_homes else 1
    undo_bytes = plan.host_bytes.get(UNDO_LOG, 0) // ranks
    return Speculation(components.largest_norm, undo_bytes) if components.speculates and undo_bytes else None


def speculation_line(components: Components) -> dict[str, Any]:
    """Returns a line on whether updates begin before the norm is known, by key, where they would have to wait."""
    if not components.may_speculate:
        return {}
    form = components.state_format
    if components.speculates:
        return {KEY: "updates begin inside backward, and are undone exactly in steps that are clipped or skipped"}
    kept = f"master={form.master} with moments in {form.state_dtype}, rounded to {form.state_rounding}"
    return {KEY: f"off, because updates of states with {kept} cannot be undone"}
