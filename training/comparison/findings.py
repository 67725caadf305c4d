"""The titles of the figures: what each of them shows, in a sentence."""

from __future__ import annotations

from collections.abc import Sequence

from training.comparison.rows import EQUAL, REFERENCE, Row

# A share of a step below this one is no finding.
LEAST_SHARE = 0.01


def memory_finding(front: Sequence[Row], key: str) -> str:
    """Says what the row with the least memory of the Pareto front takes of its reference. `key`: the memory."""
    for row in front:
        memory = row.reference.mean(key) if row.reference and row.reference is not row else None
        if memory and row.ratio is not None:
            share = row.mean(key) / memory
            return f"{row.name}: {share:.2f} of the memory and {row.ratio:.2f} of the step time of {row.reference.name}"
    # No run is better than this one in either.
    return (
        f"{front[0].name} takes the least memory and the least time" if len(front) == 1 else "Step time against memory"
    )


def waits(row: Row) -> tuple[float, float, float]:
    """Returns the ms of a step spent on compute, on waiting for copies and on waiting for the optimizer."""
    step = row.mean("perf/step_ms")
    stall = min(row.mean("transfer/stall_ms") or 0.0, step)
    wait = min(row.mean("optimizer/wait_ms") or 0.0, step - stall)
    return step - stall - wait, stall, wait


def time_finding(rows: Sequence[Row]) -> str:
    """Says which row waits longest, as a share of its step, and for what."""
    shares = [(row, *(part / row.mean("perf/step_ms") for part in waits(row))) for row in rows]
    row, computes, copies, updates = min(shares, key=lambda each: each[1])
    if computes > 1 - LEAST_SHARE:
        return "No run waits for copies or for the optimizer"
    what = [f"{copies:.0%} of its step for copies"] if copies >= LEAST_SHARE else []
    what += [f"{updates:.0%} of its step for the optimizer"] if updates >= LEAST_SHARE else []
    return f"{row.name} waits longest: {' and '.join(what) or f'{copies + updates:.0%} of its step'}"


def loss_finding(rows: Sequence[Row]) -> str:
    """Says how many rows have the losses of their reference in every bit, and how far the others are from theirs."""
    curves = [row.curve for row in rows if row.curve not in (None, REFERENCE)]
    differing = [curve for curve in curves if curve != EQUAL]
    if not curves:
        return "Training loss"
    if not differing:
        return "All losses are equal in every bit to those of the resident run"
    count = len(curves) - len(differing)
    start = f"{count} of {len(curves)} runs have the losses of the resident run in every bit; " if count else ""
    return f"{start}{'others' if count else 'losses'} differ by up to {max(differing, key=float)}".capitalize()
