"""Predicts the time of a step from the operations and bytes of its phases and from the speeds of a machine."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from offload.planning.dry_run import Phase
from offload.planning.memory_tracker import EVEN
from offload.planning.simulated_streams import Bandwidth, Work


@dataclass(frozen=True)
class UpdateTimes:
    """The optimizer's part of a step: `host_ms` on the host's cores, `device_ms` on the device.

    `begins` says when the host's part may begin: "after" the step, which then waits for it; "at the end" of backward,
    hidden behind the forward that follows; or "inside" backward, as soon as gradients have landed. At most `left_ms` of
    it may be left when backward ends: backward waits for the rest where gradients have no homes. "inside" holds for
    `inside_share` of it, 0 to 1: the rest waits for the end of backward.
    """

    host_ms: float = 0.0
    device_ms: float = 0.0
    begins: str = "after"
    left_ms: float = math.inf
    inside_share: float = 1.0


@dataclass(frozen=True)
class Forecast:
    """The predicted time of a step and its parts, in ms.

    `alone_ms` are the times that compute, copies in, copies out, exchanges with other devices and the host's update are
    expected to take, each alone. `bound` names the part that would have to be faster for a shorter step. `phases_ms`
    are the phases in order.
    """

    step_ms: float
    alone_ms: dict[str, float]
    bound: str
    phases_ms: tuple[float, ...]


def floor_ms(
    bandwidth: Bandwidth, bytes_in: float, bytes_out: float, flops: float = 0.0, peak_flops_per_s: float | None = None
) -> float | None:
    """Returns the time below which no step of this work can be on a GPU, in ms; None if nothing bounds it.

    It is the longest of the FLOPs at the peak rate of the device, where that is known, and the bytes of each direction
    at the bandwidth of that direction alone. The host's update has no part in it: the speed of the host is an estimate.
    """
    compute_ms = flops / peak_flops_per_s * 1e3 if peak_flops_per_s else 0.0
    return max(compute_ms, bandwidth.two_way_ms(bytes_in, 0), bandwidth.two_way_ms(0, bytes_out)) or None


def hidden_share(
    phases: Sequence[Phase],
    bandwidth: Bandwidth,
    flops_per_s: float,
    memory_gb_s: float = math.inf,
    costs: Mapping[str, float] = EVEN,
) -> float:
    """Returns the share of the swapped activations, 0 to 1, whose copies compute can hide beside those of weights."""
    share = 1.0
    for phase in phases:
        acts_in, acts_out = phase.activation_h2d_bytes, phase.activation_d2h_bytes
        weights_ms = bandwidth.two_way_ms(phase.h2d_bytes - acts_in, phase.d2h_bytes - acts_out)
        wanted_ms = bandwidth.two_way_ms(acts_in, acts_out)
        if wanted_ms:
            compute_ms = phase.compute_ms(flops_per_s, memory_gb_s, costs)
            share = min(share, (compute_ms - weights_ms) / wanted_ms)
    return max(share, 0.0)


def forecast(
    phases: Sequence[Phase],
    bandwidth: Bandwidth,
    flops_per_s: float,
    update: UpdateTimes,
    simulated_ms: float | None = None,
    memory_gb_s: float = math.inf,
    links_gb_s: float = math.inf,
    costs: Mapping[str, float] = EVEN,
) -> Forecast:
    """Predicts the time of a step of `phases`; `simulated_ms` is the time of forward and backward, where it is known.

    `memory_gb_s` are the GB that operations other than products read and write in the device's memory in a second,
    `links_gb_s` those that it receives from other devices. `costs`: see `Phase.compute_ms`.

    Without it, compute and copies overlap within a phase, and each phase waits for both of the one before: gradients
    do not leave in forward, and backward does not begin before its forward has ended.
    """
    compute_ms = [phase.compute_ms(flops_per_s, memory_gb_s, costs) for phase in phases]
    waits_ms = [bandwidth.two_way_ms(phase.waited_for_bytes, 0) for phase in phases]
    copies_ms = [bandwidth.two_way_ms(phase.h2d_bytes, phase.d2h_bytes) for phase in phases]
    exchanges_ms = [phase.exchanged_bytes / links_gb_s / 1e6 for phase in phases]
    phases_ms = [
        max(compute + wait, copies, exchange)
        for compute, wait, copies, exchange in zip(compute_ms, waits_ms, copies_ms, exchanges_ms, strict=True)
    ]
    alone_ms = {
        "compute": sum(compute_ms),
        "copies in": bandwidth.two_way_ms(sum(phase.h2d_bytes for phase in phases), 0),
        "copies out": bandwidth.two_way_ms(0, sum(phase.d2h_bytes for phase in phases)),
        "exchanges between devices": sum(exchanges_ms),
        "host optimizer": update.host_ms,
    }
    not_hidden_ms = update.host_ms - sum(hidden_update_ms(update, phases_ms))
    parts = alone_ms | {
        # Where copies are the bound, they are so phase by phase.
        "copies that compute waits for": sum(waits_ms),
        "host optimizer": not_hidden_ms,
        "device optimizer": update.device_ms,
    }
    both_ms = sum(phases_ms) if simulated_ms is None else simulated_ms + sum(waits_ms)
    return Forecast(
        step_ms=both_ms + not_hidden_ms + update.device_ms,
        alone_ms=alone_ms,
        bound=max(parts, key=parts.get),
        phases_ms=tuple(phases_ms),
    )


def bounded_by_files(step: Forecast, files_ms: float) -> Forecast:
    """Returns the forecast of a step whose weights take `files_ms` to be read from files, beside all else."""
    alone_ms = step.alone_ms | {"files": files_ms}
    if files_ms <= step.step_ms:
        return replace(step, alone_ms=alone_ms)
    return replace(step, step_ms=files_ms, alone_ms=alone_ms, bound="files")


def hidden_update_ms(update: UpdateTimes, phases_ms: Sequence[float]) -> tuple[float, float]:
    """Returns the ms of the host's update that run beside the last backward, and beside the forward that follows."""
    beside_backward = min(update.host_ms * update.inside_share, phases_ms[-1]) if update.begins == "inside" else 0.0
    left_ms = min(update.host_ms - beside_backward, update.left_ms)
    beside_forward = 0.0 if update.begins == "after" else min(left_ms, phases_ms[0])
    return beside_backward, beside_forward


def update_work(update: UpdateTimes, phases_ms: Sequence[float], both_ms: float) -> list[Work]:
    """Returns when a step updates, if its forward and backward end at `both_ms`: one of many equal steps.

    The host's update that runs beside the next forward is at the start, where that of the step before is.
    """
    beside_backward, beside_forward = hidden_update_ms(update, phases_ms)
    alone = update.host_ms - beside_backward - beside_forward
    began = max(both_ms - phases_ms[-1], 0.0)
    work = [
        Work("host update", 0.0, beside_forward),
        Work("host update", began, began + beside_backward),
        Work("host update", both_ms, both_ms + alone),
        Work("device update", both_ms + alone, both_ms + alone + update.device_ms),
    ]
    return [part for part in work if part.end_ms > part.start_ms]
