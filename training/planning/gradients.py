"""Plans a run again with its gradients kept, where the plan with released ones shows that to be needed, or faster."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from offload.planning import NotFinalError
from training.planning.report import RunPlan
from training.settle.components import Components, footprint_of
from training.settle.gradients import KEY, GradientChoice

Plan = Callable[[Components], tuple[Components, RunPlan]]

# Steps that are longer by a smaller share are as fast, for what a plan knows.
LONGER = 1.02

UNSEEN = "no dry run shows that all are final when they land, because this model needs values to run"


def with_gradients_chosen(components: Components, plan: Plan) -> tuple[Components, RunPlan]:
    """Returns `plan(components)`, or that of the same run with gradients kept.

    They are kept where the dry run shows one that is not final when it lands; and where that fits and is faster, unless
    the user asked for their release. Raises UserError where the user did, and one is not final.
    """
    try:
        filled, released = plan(components)
    except NotFinalError as error:
        return plan(_with(components, components.gradients.kept_because(error.problem)))
    forecast, choice = released.forecast, filled.gradients
    hides_all = not released.has_gpu or forecast.alone_ms["host optimizer"] <= forecast.phases_ms[-1]
    if not choice.released or choice.why is None or hides_all:
        return filled, released
    _, kept = plan(_with(filled, GradientChoice()))
    if forecast.step_ms < LONGER * kept.forecast.step_ms or False in kept.fits.values():
        return _with(filled, choice), released
    why = (
        f"there is room, and the next forward hides what backward does not: steps of {kept.forecast.step_ms:,.0f} ms"
        f" in place of {forecast.step_ms:,.0f}"
    )
    return _with(filled, choice.kept_because(why)), replace(kept, chosen={**released.chosen, KEY: f"keep: {why}"})


def _with(components: Components, choice: GradientChoice) -> Components:
    """Returns the components of a run with another choice; their mode has been told."""
    footprint = footprint_of(components.config, components.mode, components.model, choice)
    return replace(components, gradients=choice, footprint=footprint)
