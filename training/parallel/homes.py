"""Whether the ranks of a host share the homes of what streams."""

from __future__ import annotations

from omegaconf import DictConfig

from offload import Mode, WeightMode
from training.config.parallel import Homes
from training.parallel.world import ranks_of_host


def shares_homes(config: DictConfig, mode: Mode) -> bool:
    """Tells whether the ranks of a host have one copy of what `mode` streams.

    The configuration was checked: `shared` was not given for hosts with different numbers of ranks.
    """
    if not isinstance(getattr(mode, "weights", mode), WeightMode) or ranks_of_host(config) == 1:
        return False
    is_even = config.devices % config.parallel.hosts == 0
    return config.parallel.homes == Homes.shared or (config.parallel.homes == Homes.auto and is_even)
