"""The time that a step is planned to take, from the phases of its dry run and the speeds of a machine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from offload.knobs import GIB
from offload.planning import (
    DryRun,
    Forecast,
    Phase,
    SimulatedStreams,
    UpdateTimes,
    bounded_by_files,
    floor_ms,
    forecast,
)
from training.planning.dry_step import MOST_DRY, examples_of_rank
from training.planning.machine import Machine
from training.planning.memory import PlannedMemory
from training.profiling.hardware import datasheet_flops
from training.settle.components import Components
from training.weights.mapped import mapped_note


@dataclass(frozen=True)
class PlannedTimes:
    """The time of a step: `forecast`, which counts the `update` of the optimizer, and the `phases` that it is made of.

    `clipped_ms` is that of a step whose updates wait for the norm, where others do not. `notes`: on weights in files.
    """

    phases: tuple[Phase, ...]
    update: UpdateTimes
    forecast: Forecast
    notes: tuple[str, ...] = ()
    clipped_ms: float | None = None

    @classmethod
    def of(
        cls,
        components: Components,
        machine: Machine,
        has_gpu: bool,
        step: DryRun,
        timed: SimulatedStreams | None,
        memory: PlannedMemory,
    ) -> PlannedTimes:
        """Adds the update and reads from files to the times of `step`, which `timed` measured if it is given."""
        footprint = components.footprint
        # Weights that were updated on the device are copied to the host, besides their gradients or instead of them.
        new_weights = 0 if components.gradients.released else memory.update.placed_gradient_bytes
        last = step.phases[-1]
        phases = (*step.phases[:-1], replace(last, d2h_bytes=last.d2h_bytes + new_weights))
        update = memory.update.time(components, machine, has_gpu, memory.update.logged_share(memory.host))
        speeds, rates = machine.speeds(components.dtype), machine.rates
        simulated_ms = _simulated_ms(components, machine, phases, timed)
        expected = forecast(phases, *speeds, update, simulated_ms, **rates)
        clipped_ms = None
        if components.speculates and update.begins == "inside":
            deferred = replace(update, begins="at the end", inside_share=0.0)
            clipped_ms = forecast(phases, *speeds, deferred, simulated_ms, **rates).step_ms
        if not footprint.file_bytes:
            return cls(phases, update, expected, clipped_ms=clipped_ms)
        weights_in = sum(phase.h2d_bytes - phase.activation_h2d_bytes for phase in phases)
        read_bytes = weights_in * footprint.file_bytes / footprint.host_weight_bytes
        room = machine.host_gib * GIB - sum(memory.host.values())
        expected, note = with_reads(expected, read_bytes, footprint.file_bytes, room, machine.disk_gb_s)
        notes = (mapped_note(components.config, components.model, footprint), note)
        return cls(phases, update, expected, notes, clipped_ms)

    def floor_ms(self, machine: Machine, dtype: torch.dtype) -> float | None:
        """Returns the shortest possible step, in ms: as `offload.planning.floor_ms`, at the peak of the datasheet."""
        bytes_in, bytes_out, flops = (
            sum(getattr(phase, name) for phase in self.phases) for name in ("h2d_bytes", "d2h_bytes", "flops")
        )
        return floor_ms(machine.bandwidth, bytes_in, bytes_out, flops, datasheet_flops(machine.name, dtype))


def _simulated_ms(
    components: Components, machine: Machine, phases: Sequence[Phase], timed: SimulatedStreams | None
) -> float | None:
    """Returns the time of forward and backward in the dry run, None if it was not timed.

    Of more microbatches than ran it is scaled: those show by how much a step is longer than its phases.
    """
    if timed is None or components.config.microbatches <= MOST_DRY:
        return timed and timed.step_ms
    if components.footprint.layer_major:
        return None
    every = forecast(phases, *machine.speeds(components.dtype), UpdateTimes(), **machine.rates).phases_ms
    # Each microbatch has two phases. The dry run has the first, and one of each size of the others.
    sizes = examples_of_rank(components.config) % components.config.microbatches
    dry = every[:4] if sizes in (0, 1) else ()
    return timed.step_ms / sum(dry) * sum(every) if dry else None


def with_reads(
    forecast: Forecast, read_bytes: float, file_bytes: int, room_bytes: float, gb_s: float | None
) -> tuple[Forecast, str]:
    """Returns the forecast of a step that reads `read_bytes` of its weights from files, and a line about it.

    What the page cache has room for (`room_bytes`) of the `file_bytes` is read once. `gb_s` is the disk's speed.
    """
    if file_bytes <= room_bytes:
        return forecast, "weights in files: the page cache has room for them, so the disk is read in the first step"
    if gb_s is None:
        unknown = "the disk's speed is not known, and the step may be longer: only hardware=auto measures it"
        return forecast, f"weights in files: read from the disk in every step; {unknown}"
    line = f"weights in files: read from the disk in every step, at {gb_s:.2f} GB/s"
    return bounded_by_files(forecast, read_bytes / gb_s / 1e6), line
