"""The keys of `parallel`: how several devices work together."""

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from training.config.declare import number


class Numa(StrEnum):
    """auto: each rank runs on the NUMA node of its GPU, where a host has several. off: it runs on any core."""

    auto = "auto"
    off = "off"


class Homes(StrEnum):
    """own: each rank has its own copy of all weights and states. shared: ranks of a host have one of what streams.

    auto: shared where each host has as many ranks, else own.
    """

    auto = "auto"
    own = "own"
    shared = "shared"


@dataclass
class Parallel:
    """The keys of a run on several devices.

    `homes`: what offload modes keep in host memory is there once for each rank, or once on a host. `hosts`: over how
    many the ranks are spread, evenly. `timeout_s`: seconds after which a rank that does not answer counts as hung.
    """

    homes: Homes = MISSING
    numa: Numa = MISSING
    hosts: int = number(at_least=1, at_most=64)
    timeout_s: float = number(above=0, at_most=1_000_000)
