"""The keys of `parallel`: how several devices work together."""

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from training.config.declare import number


class Reduction(StrEnum):
    """ordered: in the order of the ranks, as one device adds microbatches. fast: in the order of NCCL or gloo."""

    ordered = "ordered"
    fast = "fast"


class Copies(StrEnum):
    """slices: each device copies in its part of a unit and gathers the others'. whole: each copies all in.

    auto: the faster of the two, by some steps of each.
    """

    auto = "auto"
    slices = "slices"
    whole = "whole"


class Links(StrEnum):
    """copies: by the devices' copy engines, where they reach each other's memory. collectives: by NCCL's or gloo's.

    Sums over several hosts, and of gradients larger than those of units that stream, are collectives in any case.
    """

    copies = "copies"
    collectives = "collectives"


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

    `homes`: what offload modes keep in host memory is there once for each rank, or once on a host. `copies`: how
    devices that share it bring it in. `links`: how these exchange slices of weights and gradients. `reduction`: the
    order in which gradients are summed. `hosts`: over how many they are spread, evenly. `timeout_s`: seconds after
    which a rank that does not answer counts as hung.
    """

    homes: Homes = MISSING
    copies: Copies = MISSING
    links: Links = MISSING
    reduction: Reduction = MISSING
    numa: Numa = MISSING
    hosts: int = number(at_least=1, at_most=64)
    timeout_s: float = number(above=0, at_most=1_000_000)
