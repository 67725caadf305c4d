"""The keys of `parallel`: how several devices work together."""

from dataclasses import dataclass
from enum import StrEnum

from omegaconf import MISSING

from training.config.declare import number


class Reduction(StrEnum):
    """ordered: in the order of the ranks, as one device adds microbatches. fast: in the order of NCCL or gloo."""

    ordered = "ordered"
    fast = "fast"


@dataclass
class Parallel:
    """How several devices work together: how gradients are summed, and after how many seconds a rank counts as hung."""

    reduction: Reduction = MISSING
    timeout_s: float = number(above=0, at_most=1_000_000)
