"""Fills vram_budget: chooses how many units stay on the device, beside the optimizer states that may live there.

A unit that stays takes its weight, its gradient and its states, and saves their copies and the host's update. States
alone take a little less and save the update only. So a search over the number of units, in which the states take what
is left, finds the shortest step.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from omegaconf import DictConfig, OmegaConf

from offload.planning import DryRun, forecast
from training.config.auto import AUTO
from training.config.construct import make_mode
from training.config.modes import weights_node
from training.planning import reference
from training.planning.machine import Machine
from training.planning.optimizer import PlannedUpdate
from training.settle.components import Components, footprint_of

# Numbers of units that are compared: the time of a step is a smooth function of the number.
CANDIDATES = 17


def resident_key(config: DictConfig) -> str | None:
    """Returns the key of the units that stay on the device, where the composition has it and its value is auto."""
    key, mode = weights_node(config)
    return f"{key}.resident" if mode.get("resident") == AUTO else None


def with_resident(components: Components, key: str, units: int) -> Components:
    """Returns the components of a run in which `count` units stay on the device, with a configuration of its own."""
    config = components.config.copy()
    OmegaConf.update(config, key, units)
    mode = make_mode(config.offload)
    return replace(
        components,
        config=config,
        mode=mode,
        footprint=footprint_of(config, mode, components.model, components.gradients),
    )


def resident_units(components: Components, machine: Machine, step: DryRun, budget_bytes: int) -> int:
    """Returns the number of resident units with which the planned step is shortest within `budget_bytes`.

    `step` is a dry run of `components`, in which no unit stays. Among numbers that are equally fast, the largest is
    taken: memory that the user has granted helps against costs that no plan knows.
    """
    key = resident_key(components.config)

    def too_large(units: int) -> bool:
        some = with_resident(components, key, units)
        return _without_states(some, step) + PlannedUpdate.of(some, 0).device_bytes > budget_bytes

    # The largest number that fits.
    most = max(bisect_left(range(components.footprint.units + 1), True, key=too_large) - 1, 0)
    numbers = sorted({round(most * part / (CANDIDATES - 1)) for part in range(CANDIDATES)})
    candidates = {units: with_resident(components, key, units) for units in numbers}
    times = {units: _step_ms(some, components, machine, step, budget_bytes) for units, some in candidates.items()}
    return min(times, key=lambda units: (round(times[units], 1), -units))


def _without_states(components: Components, step: DryRun) -> int:
    """Returns the bytes at the peak of the device, without optimizer states."""
    footprint = components.footprint
    weights = footprint.resident_bytes + footprint.slot_bytes + reference.device_bytes(components)
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
    speeds = machine.bandwidth, machine.flops_per_s(components.dtype)
    rates = {"device_gb_s": machine.device_gb_s, "links_gb_s": machine.exchange_gb_s}
    return forecast(phases, *speeds, times, **rates).step_ms
