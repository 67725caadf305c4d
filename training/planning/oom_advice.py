"""Explains memory that runs out in the middle of a run: the planned bytes, and what to change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from offload import format_bytes
from training.errors import UserError
from training.planning.advice import memory_advice
from training.planning.report import RunPlan
from training.runs import allocator
from training.runs.failures import is_device_memory, is_host_memory, requested
from training.settle.components import Components


class OutOfMemoryError(UserError):
    """The GPU or the host has too little memory for the run."""

    status = "out_of_memory"


@contextmanager
def memory_explained(components: Components, plan: RunPlan) -> Iterator[None]:
    """Surrounds code that allocates; turns an error because of too little memory into an OutOfMemoryError.

    Its message has the plan's numbers and what to change.
    """
    try:
        yield
    except Exception as error:
        if is_device_memory(error):
            found = f"the GPU is out of memory{requested(error)}"
            setting = "" if allocator.segments_expand() else f"; {allocator.ADVICE}"
            raise OutOfMemoryError(f"{found}: {_explained(components, plan, 'vram_budget')}{setting}") from error
        if is_host_memory(error):
            found = f"the host is out of memory{_in_brackets(error)}"
            raise OutOfMemoryError(f"{found}: {_explained(components, plan, 'host_budget')}") from error
        raise


def _in_brackets(error: BaseException) -> str:
    """Returns the text of the engine's own errors, which tells both sizes; those of others tell nothing more."""
    return f" ({error})" if isinstance(error, MemoryError) and str(error) else ""


def _explained(components: Components, plan: RunPlan, key: str) -> str:
    total, budget = plan.totals[key], plan.budgets[key]
    by_part = plan.device_bytes if key == "vram_budget" else plan.host_bytes
    parts = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in by_part.items() if nbytes)
    limit = f" of {format_bytes(budget)}" if budget is not None else ""
    needed = max(total - budget, 0) if budget is not None else 0
    advice = memory_advice(components, plan, key, needed)
    return f"planned were {format_bytes(total)}{limit} ({parts}): take {advice}"
