"""How long a step takes, from what it computes and copies, and how fast a machine does either."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.planning.dry_run import Phase
from offload.runtime.bandwidth import Bandwidth


@dataclass(frozen=True)
class Update:
    """The optimizer's part of a step: `host_ms` on the host's cores, `device_ms` on the device.

    `begins` says when the host's may begin: "after" the step, which then waits for them; "at the end" of backward,
    hidden behind the forward that follows; or "inside" backward, as soon as gradients have landed.
    """

    host_ms: float = 0.0
    device_ms: float = 0.0
    begins: str = "after"


@dataclass(frozen=True)
class Forecast:
    """The time of a step and what it is made of, in ms.

    `floors` are the times that compute, copies in, copies out and the host's update take, each alone; `bound` is the
    one that the step would be shortened by. `phases_ms` has the phases in their order.
    """

    step_ms: float
    floors: dict[str, float]
    bound: str
    phases_ms: tuple[float, ...]


def hidden_share(phases: Sequence[Phase], bandwidth: Bandwidth, flops_per_s: float) -> float:
    """The share of the swapped activations, 0 to 1, whose copies find room behind compute beside those of weights."""
    share = 1.0
    for phase in phases:
        acts_in, acts_out = phase.activation_h2d_bytes, phase.activation_d2h_bytes
        weights_ms = bandwidth.two_way_ms(phase.h2d_bytes - acts_in, phase.d2h_bytes - acts_out)
        wanted_ms = bandwidth.two_way_ms(acts_in, acts_out)
        if wanted_ms:
            share = min(share, (phase.flops / flops_per_s * 1e3 - weights_ms) / wanted_ms)
    return max(share, 0.0)


def forecast(
    phases: Sequence[Phase],
    bandwidth: Bandwidth,
    flops_per_s: float,
    update: Update,
    rehearsed_ms: float | None = None,
) -> Forecast:
    """The time of a step of `phases`; `rehearsed_ms`, where it is known, is what forward and backward took in time.

    Else, within a phase compute and copies go on side by side, from one to the next they wait for each other: gradients
    do not leave in forward, and backward does not begin before it.
    """
    compute_ms = [phase.flops / flops_per_s * 1e3 for phase in phases]
    waits_ms = [bandwidth.two_way_ms(phase.waited_for_bytes, 0) for phase in phases]
    copies_ms = [bandwidth.two_way_ms(phase.h2d_bytes, phase.d2h_bytes) for phase in phases]
    phases_ms = [
        max(compute + wait, copies) for compute, wait, copies in zip(compute_ms, waits_ms, copies_ms, strict=True)
    ]
    beside_ms = {"after": 0.0, "at the end": phases_ms[0], "inside": phases_ms[0] + phases_ms[-1]}[update.begins]
    floors = {
        "compute": sum(compute_ms),
        "copies in": bandwidth.two_way_ms(sum(phase.h2d_bytes for phase in phases), 0),
        "copies out": bandwidth.two_way_ms(0, sum(phase.d2h_bytes for phase in phases)),
        "host optimizer": update.host_ms,
    }
    not_hidden_ms = max(update.host_ms - beside_ms, 0.0)
    parts = floors | {
        # Where copies bind, they do so phase by phase.
        "copies that compute waits for": sum(waits_ms),
        "host optimizer": not_hidden_ms,
        "device optimizer": update.device_ms,
    }
    both_ms = sum(phases_ms) if rehearsed_ms is None else rehearsed_ms + sum(waits_ms)
    return Forecast(
        step_ms=both_ms + not_hidden_ms + update.device_ms,
        floors=floors,
        bound=max(parts, key=parts.get),
        phases_ms=tuple(phases_ms),
    )
