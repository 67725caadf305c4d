"""A plan of several ranks: the host memory of those of one host, and a note on what the plan leaves out."""

from __future__ import annotations

from collections.abc import Mapping

from training.components import Components
from training.parallel.world import ranks_of_host

OWN = (
    "{count} devices: bytes of the device and copies are those of each, bytes of a host those of its {local} processes,"
    " each with its own copy; the time in which gradients are exchanged is not in the step"
)
SHARED = (
    "{count} devices: bytes of the device and copies are those of each, bytes of the host those of its {local}"
    " processes, which share weights and states; planned as if each copied whole units and gradients, of which it"
    " copies its part"
)


def bytes_of_ranks(host: Mapping[str, int], components: Components) -> dict[str, int]:
    """Returns bytes of host memory by part for the ranks of one host; `host` has those of one rank.

    Each rank is a process with weights, gradients and states of its own, unless the ranks share them.
    """
    config, ranks = components.config, ranks_of_host(components.config)
    counts = dict.fromkeys(host, ranks)
    if components.shares_homes:
        # Gradients of several microbatches are added in memory of each rank, before the ranks sum them.
        adds = config.microbatches > 1 and not components.footprint.layer_major
        counts |= {"weights": 1, "optimizer": 1, "gradients": ranks + 1 if adds else 1}
    return {name: nbytes * counts[name] for name, nbytes in host.items()}


def note_of_ranks(components: Components) -> str | None:
    """Returns a line on what the numbers of a plan are those of; None for one device."""
    if components.config.devices == 1:
        return None
    note = SHARED if components.shares_homes else OWN
    return note.format(count=components.config.devices, local=ranks_of_host(components.config))
