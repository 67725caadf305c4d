"""Plans a run: the bytes that it will hold and move, the time of a step and its bottleneck, and whether it fits.

A dry run of the step on the meta device counts bytes, and times follow from the speeds of a machine.

Two choices are left to the plan: how many units stay on the device, and whether gradients are kept after all. A unit
that stays takes its weight, its gradient and its states, and saves their copies and the host's update. States alone
take a little less and save the update only. So a search over the number of units, in which the states take what is
left, finds the shortest step.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from offload.planning import DryRun, NotFinalError, SimulatedStreams, forecast, hidden_share, update_work
from training.config.construct import make_mode
from training.config.declare import AUTO
from training.config.modes import weights_node
from training.errors import UserError, first_line
from training.planning.dry_step import MOST_DRY, dry_step, forward_flops, reference_note, refuse_shapes, without_dry_run
from training.planning.machine import Machine
from training.planning.memory import PlannedMemory, PlannedUpdate, budgets_of, checkpoint_bytes, logits_bytes
from training.planning.notes import notes_of, streamed_share
from training.planning.report import RunPlan
from training.planning.times import PlannedTimes
from training.profiling.timeline import Interval, Timeline, draw_chart
from training.settle.components import Components, fills_budget, footprint_of, reasons_of, trained_parameters
from training.settle.settled import KEPT

# Numbers of units that are compared: the time of a step is a smooth function of the number.
CANDIDATES = 17
# Steps that are longer by a smaller share are as fast, for what a plan knows.
LONGER = 1.02
# The keys that no dry run depends on.
BESIDE_STEPS = {"optimizer", "schedule", "clip_norm", "vram_budget", "host_budget"}
WAITS_FOR_UPDATES = "optimizer=host_adamw hides updates on the host behind the step, most of all with clip_norm=null"
EAGER_EXPERTS = (
    "model.overrides.experts_implementation=eager computes those experts that tokens choose, which values tell:"
    " grouped_mm and batched_mm can be planned"
)
UNPLANNED = "activations are not in the plan"
UNSEEN = "no dry run shows that all are final when they land, because this model needs values to run"

logger = logging.getLogger(__name__)


def plan_filled(
    components: Components, machine: Machine, has_gpu: bool, steps: Steps | None = None
) -> tuple[Components, RunPlan]:
    """Plans the run; where offload.resident=auto, as many units stay on the device as pay within a vram_budget.

    Returns the components with that choice, which may keep gradients after all. `steps` are dry runs of other plans for
    this machine, which are not made again, and get those that are made. Raises UserError for a release of gradients
    that was asked for and cannot be.
    """
    known, machine = {} if steps is None else steps, machine.over_rows(components.config.seq_len)
    return with_gradients_chosen(components, lambda some: _plan_filled(some, machine, has_gpu, known))


def _plan_filled(components: Components, machine: Machine, has_gpu: bool, known: Steps) -> tuple[Components, RunPlan]:
    config, key = components.config, resident_key(components.config)
    if key is None:
        plan = plan_run(components, machine, has_gpu, known)
        return components, replace(plan, chosen=reasons_of(components))
    # In `components` no unit stays.
    streamed = PlannedStep.known(components, machine, has_gpu, known)
    units = 0
    if has_gpu and config.vram_budget is not None:
        budget_bytes = budgets_of(config, machine, has_gpu)["vram_budget"]
        units = resident_units(components, machine, streamed.run, budget_bytes)
    while units:
        filled = with_resident(components, key, units)
        plan = plan_run(filled, machine, has_gpu, known)
        if plan.fits["vram_budget"]:
            break
        # The search takes activations to be the same whatever stays.
        units = units * 9 // 10
    else:
        filled, plan = components, _plan_of(streamed, components, machine, has_gpu)
    filled = resident_chosen(filled, config, key, units)
    return filled, replace(plan, chosen=reasons_of(filled))


def draw_timeline(plan: RunPlan, microbatches: int, path: Path, title: str) -> None:
    """Draws forward and backward of the dry run and the optimizer's update.

    Beyond `MOST_DRY` microbatches only the first are drawn; the title then has the length of the whole step too.
    """
    intervals = (Interval(work.lane, work.start_ms * 1e3, work.end_ms * 1e3) for work in plan.timeline)
    ordered = tuple(sorted(intervals, key=lambda interval: interval.start_us))
    timeline, step_ms = Timeline(ordered, overlaps=True), plan.forecast.step_ms
    drawn = f"the first {MOST_DRY} of {microbatches} microbatches" if microbatches > MOST_DRY else "without waits"
    whole = timeline.end_us / 1e3 > 0.99 * step_ms
    draw_chart(timeline, path, f"{title}; step" if whole else f"{title}; step of {step_ms:,.1f} ms, {drawn}")


@dataclass(frozen=True)
class PlannedStep:
    """A step that ran on the meta device, with the streams that timed it; or the bounds of the mode's footprint."""

    run: DryRun
    timed: SimulatedStreams | None
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, components: Components, machine: Machine, has_gpu: bool) -> PlannedStep:
        timed = machine.simulated(components.dtype) if has_gpu else None
        try:
            return cls(dry_step(components, has_gpu, timed), timed)
        except (UserError, NotFinalError):
            raise
        except Exception as error:  # a model may fail in any way on tensors without values, and yet run on real ones
            refuse_shapes(components)
            logger.debug("no dry run", exc_info=error)
            if components.gradients.released and components.gradients.why is not None:
                raise NotFinalError(UNSEEN, first_line(error)) from error
            why = f"this model needs values to run ({first_line(error)})"
            if getattr(components.model, "experts_implementation", None) == "eager" and "nonzero" in why:
                why = EAGER_EXPERTS
            note = f"{UNPLANNED}: {why}"
            # The timeline ends where the dry run failed, so it is of no use.
            return cls(without_dry_run(components), None, (note,))

    @classmethod
    def known(cls, components: Components, machine: Machine, has_gpu: bool, steps: Steps) -> PlannedStep:
        """Returns the step that `steps` has of a run that differs in its update or its budgets alone, or makes it."""
        config = components.config
        parts = [(OmegaConf.get_type(config, name), config[name]) for name in config if name not in BESIDE_STEPS]
        key = repr(parts), components.options.release_gradients
        if key not in steps:
            steps[key] = cls.of(components, machine, has_gpu)
        return steps[key]


Steps = dict[tuple[str, bool], PlannedStep]


def plan_run(components: Components, machine: Machine, has_gpu: bool, known: Steps | None = None) -> RunPlan:
    """Plans the run that `components` make up, on `machine`; leaves the components as they were."""
    step = PlannedStep.known(components, machine, has_gpu, {} if known is None else known)
    return _plan_of(step, components, machine, has_gpu)


def _plan_of(planned: PlannedStep, components: Components, machine: Machine, has_gpu: bool) -> RunPlan:
    footprint, rates, speeds = components.footprint, machine.rates, machine.speeds(components.dtype)
    step, timed, notes, kept_bytes = planned.run, planned.timed, list(planned.notes), 0
    if footprint.activation_budget_bytes is None:
        share = hidden_share(step.phases, *speeds, rates["memory_gb_s"], rates["costs"])
        everything, step = step, step.swapping(share)
        kept_bytes = step.peak_bytes - everything.peak_bytes
        notes.append(f"offload.budget=auto: {share:.0%} of the activations taken to be hidden behind compute")
        # The timeline is that of the dry run, which swaps everything.
        timed = None
    plan = _assembled(components, machine, has_gpu, step, timed)
    waits = plan.forecast.bound == "host optimizer" and not components.updates_overlap
    if has_gpu and footprint.units and waits:
        notes.append(WAITS_FOR_UPDATES)
    if step.total("grouped_flops"):
        tflops = machine.grouped_tflops
        rate = "that of others" if tflops is None else f"{tflops:,.3g} TFLOP/s, as measured"
        notes.append(f"the rate of the products of experts is {rate}")
    notes += notes_of(components, reference_note(components, machine, has_gpu), step.square_bytes)
    return replace(plan, kept_bytes=kept_bytes, streamed=streamed_share(components), notes=(*plan.notes, *notes))


def _assembled(
    components: Components, machine: Machine, has_gpu: bool, step: DryRun, timed: SimulatedStreams | None
) -> RunPlan:
    """Puts the memory and the times of the step together."""
    config = components.config
    memory = PlannedMemory.of(components, machine, has_gpu, step)
    times = PlannedTimes.of(components, machine, has_gpu, step, timed, memory)
    # Tied parameters count once.
    everything = sum(parameter.numel() for parameter in components.model.parameters())
    trained = sum(parameter.numel() for parameter in trained_parameters(components.model))
    model_flops = components.task.flops(components.model, config)
    if model_flops is None and any(phase.flops for phase in times.phases):
        # Backward has those of forward for the gradients of activations, and as many for those of weights that train.
        model_flops = (2 + trained / everything) * forward_flops(components)
    return RunPlan(
        device_bytes=memory.device,
        host_bytes=memory.host,
        logits_bytes=logits_bytes(components),
        square_bytes=step.square_bytes,
        pinned_bytes=memory.pinned_bytes,
        step_bytes={
            "in": sum(phase.h2d_bytes for phase in times.phases),
            "out": sum(phase.d2h_bytes for phase in times.phases),
            "activations in": step.total("activation_h2d_bytes"),
            "activations out": step.total("activation_d2h_bytes"),
        },
        forecast=times.forecast,
        model_flops=model_flops or 0.0,
        floor_ms=times.floor_ms(machine, components.dtype) if has_gpu else None,
        budgets=budgets_of(config, machine, has_gpu),
        machine=machine,
        has_gpu=has_gpu,
        clipped_ms=times.clipped_ms,
        parameters=everything,
        trained_parameters=trained,
        checkpoint_bytes=checkpoint_bytes(components),
        units=components.task.units(config),
        unit=components.task.unit,
        microbatches=config.microbatches,
        steps=config.steps,
        notes=times.notes,
        timeline=(*timed.work, *update_work(times.update, times.forecast.phases_ms, timed.step_ms)) if timed else (),
    )


def resident_key(config: DictConfig) -> str | None:
    """Returns the key of the units that stay on the device, where the composition has it and its value is auto."""
    key, mode = weights_node(config)
    return f"{key}.resident" if mode.get("resident") == AUTO else None


def with_resident(components: Components, key: str, units: int) -> Components:
    """Returns the components of a run in which `units` stay on the device, with a configuration of its own."""
    config = components.config.copy()
    OmegaConf.update(config, key, units)
    mode = make_mode(config.offload)
    footprint = footprint_of(config, mode, components.model, components.options)
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
    # To cut a deep model takes half a second, and the second search comes to numbers of the first.
    filled = cache(partial(with_resident, components, resident_key(components.config)))

    def too_large(units: int) -> bool:
        some = filled(units)
        return _without_states(some, step) + PlannedUpdate.of(some, 0).device_bytes > budget_bytes

    most = max(bisect_left(range(components.footprint.units + 1), True, key=too_large) - 1, 0)
    numbers = sorted({round(most * part / (CANDIDATES - 1)) for part in range(CANDIDATES)})
    times = {units: _step_ms(filled(units), components, machine, step, budget_bytes) for units in numbers}
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


def with_gradients_chosen(
    components: Components, plan: Callable[[Components], tuple[Components, RunPlan]]
) -> tuple[Components, RunPlan]:
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
