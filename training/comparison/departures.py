"""Finds where and why a curve departs from that of the resident run, from what both runs recorded."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

LOSS, NORM = "train/loss", "train/grad_norm"
# Relative differences up to this one are those of a lower precision, or of sums in another order.
ROUNDING = 0.02


def departure(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> str | None:
    """Returns the first step at which the losses differ, and why as far as it was measured; None if they do not.

    Gradients tell more than losses: those of a step show in the loss of the next. A norm that only one run recorded
    tells nothing, and neither do steps that only one logged.
    """
    expected = {record["train/step"]: record for record in reference if "train/step" in record}
    pairs = [(record, expected[record["train/step"]]) for record in records if record.get("train/step") in expected]
    pairs = [(own, other) for own, other in pairs if LOSS in own and LOSS in other]
    differences = [relative_difference(own[LOSS], other[LOSS]) for own, other in pairs]
    apart = next((index for index, difference in enumerate(differences) if difference), None)
    if apart is None:
        return None
    own, other = pairs[apart]
    # The gradients of the step itself were computed with other weights already, but for the first.
    normed = [(a, b) for a, b in pairs[: max(apart, 1)] if NORM in a and NORM in b]
    return f"the loss differs from step {own['train/step']}: {_cause(own, other, normed, first=apart == 0)}"


def _cause(
    own: dict[str, Any], other: dict[str, Any], normed: Sequence[tuple[dict[str, Any], dict[str, Any]]], first: bool
) -> str:
    for a, b in normed:
        step = a["train/step"]
        if not math.isfinite(a[NORM]) and math.isfinite(b[NORM]):
            return f"the gradient norm of step {step} is {a[NORM]}"
        if a[NORM] == 0 != b[NORM]:
            return f"the gradients of step {step} are zero"
        if relative_difference(a[NORM], b[NORM]) > ROUNDING:
            return f"the gradient norm of step {step} is {a[NORM]:.4g}, not {b[NORM]:.4g}"
    if not math.isfinite(own[LOSS]):
        return f"it is {own[LOSS]}"
    by = relative_difference(own[LOSS], other[LOSS])
    if first:
        kind = "another precision or order of sums" if by <= ROUNDING else "another loss"
        return f"the forward with the same weights differs by {by:.1e}, {kind}"
    if any(relative_difference(a[NORM], b[NORM]) for a, b in normed):
        return f"gradients differ by rounding ({by:.1e} in the loss)"
    alike = "equal" if normed else "not recorded"
    return f"gradient norms before were {alike}, the update differs ({by:.1e} in the loss)"


def relative_difference(value: float, other: float) -> float:
    """Returns the difference over the larger size: 0 for equal values, as two NaN are, and infinity beside one."""
    if value == other or (math.isnan(value) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.inf
    return abs(value - other) / max(abs(value), abs(other))
