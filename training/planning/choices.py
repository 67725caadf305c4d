"""Choices that a run leaves to its plan: how many units stay on the device, and whether gradients are kept after all.

A unit that stays takes its weight, its gradient and its states, and saves their copies and the host's update. States
alone take a little less and save the update only. So a search over the number of units, in which the states take what
is left, finds the shortest step.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from offload.planning import DryRun, NotFinalError, forecast
from training.config.construct import make_mode
from training.config.declare import AUTO
from training.config.modes import weights_node
from training.planning.machine import Machine
from training.planning.optimizer import PlannedUpdate
from training.planning.report import RunPlan
from training.settle.components import Components, fills_budget, footprint_of, reasons_of
from training.settle.gradients import KEPT

Plan = Callable[[Components], tuple[Components, RunPlan]]

# Numbers of units that are compared: the time of a step is a smooth function of the number.
CANDIDATES = 17
# Steps that are longer by a smaller share are as fast, for what a plan knows.
LONGER = 1.02


def resident_key(config: DictConfig) -> str | None:
    """Returns the key of the units that stay on the device, where the composition has it and its value is auto."""
    key, mode = weights_node(config)
    return f"{key}.resident" if mode.get("resident") == AUTO else None


def with_resident(components: Components, key: str, units: int) -> Components:
    """Returns the components of a run in which `units` stay on the device, with a configuration of its own."""
    config = components.config.copy()
    OmegaConf.update(config, key, units)
    mode = make_mode(config.offload)
    footprint = footprint_of(config, mode, components.model, components.gradients)
    return replace(components, mode=mode, footprint=footprint).with_config(config)


def resident_chosen(components: Components, config: DictConfig, key: str, units: int) -> Components:
    """Writes the number of units, with which `components` were planned, into `config`; returns them with the reason."""
    OmegaConf.update(config, key, units)
    reason = f"{units} of {units + components.footprint.units} units: {fills_budget(config)}"
    found = components.with_config(config)
    return replace(found, settled=found.settled.because({key: reason}))


def resident_units(components: Components, machine: Machine, step: DryRun, budget_bytes: int) -> int:
    """Returns the number of resident units with which the planned step is shortest within `budget_bytes`.

    `step` is a dry run of `components`, in which no unit stays. Among numbers that are equally fast, the largest is
    taken: memory that the user has granted helps against costs that no plan knows.
    """
    key = resident_key(components.config)

    def too_large(units: int) -> bool:
        some = with_resident(components, key, units)
        return _without_states(some, step) + PlannedUpdate.of(some, 0).device_bytes > budget_bytes

    most = max(bisect_left(range(components.footprint.units + 1), True, key=too_large) - 1, 0)
    numbers = sorted({round(most * part / (CANDIDATES - 1)) for part in range(CANDIDATES)})
    times = {
        units: _step_ms(with_resident(components, key, units), components, machine, step, budget_bytes)
        for units in numbers
    }
    return min(times, key=lambda units: (round(times[units], 1), -units))


def _without_states(components: Components, step: DryRun) -> int:
    """Returns the bytes at the peak of the device, without optimizer states."""
    footprint = components.footprint
    weights = footprint.resident_bytes + footprint.slot_bytes + components.reference_device_bytes
    return weights + footprint.resident_gradient_bytes + step.activation_bytes


def _step_ms(components: Components, streamed: Components, machine: Machine, step: DryRun, budget_bytes: int) -> float:
    """Plans the time of a step from `step`, the dry run in which all units stream: copies shrink with the units."""
    share = components.footprint.host_weight_bytes / max(streamed.footprint.host_weight_bytes, 1)
    phases = [
        replace(
            phase,
            h2d_bytes=phase.activation_h2d_bytes + share * (phase.h2d_bytes - phase.activation_h2d_bytes),
            d2h_bytes=phase.activation_d2h_bytes + share * (phase.d2h_bytes - phase.activation_d2h_bytes),
            waited_for_bytes=share * phase.waited_for_bytes,
            exchanged_bytes=share * phase.exchanged_bytes,
        )
        for phase in step.phases
    ]
    update = PlannedUpdate.of(components, budget_bytes - _without_states(components, step))
    times = update.time(components, machine, has_gpu=True)
    return forecast(phases, *machine.speeds(components.dtype), times, **machine.rates).step_ms


def with_gradients_chosen(components: Components, plan: Plan) -> tuple[Components, RunPlan]:
    """Returns `plan(components)`, or that of the same run with gradients kept.

    They are kept where the dry run shows one that is not final when it lands; and where that fits and is faster, unless
    the user asked for their release. Raises UserError where the user did, and one is not final.
    """
    try:
        filled, released = plan(components)
    except NotFinalError as error:
        return plan(components.with_gradients(components.gradients.kept_because(error.problem)))
    forecast, choice = released.forecast, filled.gradients
    hides_all = not released.has_gpu or forecast.alone_ms["host optimizer"] <= forecast.phases_ms[-1]
    if not choice.released or choice.why is None or hides_all:
        return filled, released
    without, kept = plan(filled.with_gradients(KEPT))
    if forecast.step_ms < LONGER * kept.forecast.step_ms or False in kept.fits.values():
        return without.with_gradients(choice), released
    why = (
        f"there is room, and the next forward hides what backward does not: steps of {kept.forecast.step_ms:,.0f} ms"
        f" in place of {forecast.step_ms:,.0f}"
    )
    found = without.with_gradients(choice.kept_because(why))
    return found, replace(kept, chosen=reasons_of(found))
