"""Compares the logged losses of a run with those of its resident run: how far, from which step, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LOSS, EVAL_LOSS, NORM = "train/loss", "eval/loss", "train/grad_norm"
# Relative differences up to this one are those of a lower precision, or of sums in another order.
ROUNDING = 0.02


def losses(records: Sequence[dict[str, Any]], key: str = LOSS) -> dict[int, float]:
    """Returns the values under `key` by step."""
    return {record["train/step"]: record[key] for record in records if {"train/step", key} <= record.keys()}


def largest_difference(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float | None:
    """Returns the largest relative difference of the losses, of training and evaluation, at steps that both logged.

    It is 0 if all are equal in every bit, infinity if only one of two is finite, None if there is no common step.
    """
    differences = []
    for key in (LOSS, EVAL_LOSS):
        own, other = losses(records, key), losses(reference, key)
        differences += [relative_difference(own[step], other[step]) for step in own.keys() & other.keys()]
    return max(differences, default=None)


def departure(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> str | None:
    """Returns the first step at which the training losses differ, and why as far as it was measured; None if equal."""
    own, other = losses(records), losses(reference)
    step = next((step for step in own if step in other and relative_difference(own[step], other[step])), None)
    if step is None:
        return None
    return f"the loss differs from step {step}: {_cause(step, records, reference)}"


def _cause(step: int, records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> str:
    """Gradients tell more than losses: those of a step show in the loss of the next."""
    own, other = losses(records), losses(reference)
    loss, by = own[step], relative_difference(own[step], other[step])
    first = not any(earlier < step for earlier in own.keys() & other.keys())
    norms, other_norms = losses(records, NORM), losses(reference, NORM)
    # The gradients of the step itself were computed with other weights already, but for the first.
    common = [at for at in norms if at in other_norms and (at < step or (first and at == step))]
    for at in common:
        norm, expected = norms[at], other_norms[at]
        if not math.isfinite(norm) and math.isfinite(expected):
            return f"the gradient norm of step {at} is {norm}"
        if norm == 0 != expected:
            return f"the gradients of step {at} are zero"
        if relative_difference(norm, expected) > ROUNDING:
            return f"the gradient norm of step {at} is {norm:.4g}, not {expected:.4g}"
    if not math.isfinite(loss):
        return f"it is {loss}"
    if first:
        kind = "another precision or order of sums" if by <= ROUNDING else "another loss"
        return f"the forward with the same weights differs by {by:.1e}, {kind}"
    if any(relative_difference(norms[at], other_norms[at]) for at in common):
        return f"gradients differ by rounding ({by:.1e} in the loss)"
    alike = "equal" if common else "not recorded"
    return f"gradient norms before were {alike}, the update differs ({by:.1e} in the loss)"


def relative_difference(value: float, other: float) -> float:
    """Returns the difference over the larger size: 0 for equal values, as two NaN are, and infinity beside one."""
    if value == other or (math.isnan(value) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.inf
    return abs(value - other) / max(abs(value), abs(other))
