"""A plan of several ranks: the host memory of those of one host, and a note on what the plan leaves out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from offload.planning import PlannedSharers, SimulatedStreams
from training.parallel.world import ranks_of_host
from training.settle.components import Components, trained_parameters

OWN = (
    "{count} devices: bytes of the device and copies are those of each, bytes of a host those of its {local} processes,"
    " each with its own copy; the time in which gradients are exchanged is not in the step"
)
SHARED = (
    "{count} devices: bytes of the device, copies and exchanges are those of each, bytes of the host those of its"
    " {local} processes, which share weights and states; {left_out} is not in the step, and each device is taken to"
    " have the whole speed of its links"
)


def bytes_of_ranks(host: Mapping[str, int], components: Components) -> dict[str, int]:
    """Returns bytes of host memory by part for the ranks of one host; `host` has those of one rank.

    Each rank is a process with weights, gradients and states of its own, unless the ranks share them.
    """
    ranks = ranks_of_host(components.config)
    counts = dict.fromkeys(host, ranks)
    if components.shares_homes:
        # Gradients of several microbatches are added in memory of each rank, before the ranks sum them.
        own = host["gradients"] if _adds_first(components) else 0
        host = {**host, "activations": max(host["activations"] - own, 0)}
        counts |= {"weights": 1, "reference": 1, "optimizer": 1, "gradients": ranks + 1 if own else 1}
    return {name: nbytes * counts[name] for name, nbytes in host.items()}


def note_of_ranks(components: Components) -> str | None:
    """Returns a line on the devices and hosts that the numbers of a plan belong to; None for one device."""
    if components.config.devices == 1:
        return None
    config, note = components.config, SHARED if components.shares_homes else OWN
    left_out = "what is summed after backward"
    if config.parallel.hosts > 1:
        left_out += ", or between hosts,"
    return note.format(count=config.devices, local=ranks_of_host(config), left_out=left_out)


def planned_sharers(components: Components, timed: SimulatedStreams | None) -> PlannedSharers | None:
    """Returns those with whom a dry run shares the homes; None where it shares nothing."""
    if not components.shares_homes:
        return None
    return PlannedSharers(ranks_of_host(components.config), components.config.parallel.hosts, timed)


def summed_after_backward(components: Components) -> Sequence[nn.Parameter]:
    """Returns the parameters whose gradients the ranks sum after backward, in the model's order."""
    everything = trained_parameters(components.model)
    if not components.shares_homes or _adds_first(components):
        return everything
    resident = set(components.footprint.resident)
    return [parameter for parameter in everything if parameter in resident]


def _adds_first(components: Components) -> bool:
    """Tells whether each rank adds the gradients of several microbatches in memory of its own."""
    return components.config.microbatches > 1 and not components.footprint.layer_major
