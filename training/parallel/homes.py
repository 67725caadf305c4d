"""Whether the ranks of a host share the homes of what streams."""

from __future__ import annotations

import logging
from collections.abc import Collection

from omegaconf import DictConfig

from offload import Mode, WeightMode
from training.config.parallel import Homes
from training.parallel.world import ranks_of_host

# They say how devices bring in what they share.
KEYS_OF_SHARED_HOMES = ("parallel.copies", "parallel.links")

logger = logging.getLogger(__name__)


def shares_homes(config: DictConfig, mode: Mode) -> bool:
    """Tells whether the ranks of a host have one copy of what `mode` streams.

    The configuration was checked: `shared` was not given for hosts with different numbers of ranks.
    """
    if not isinstance(getattr(mode, "weights", mode), WeightMode) or ranks_of_host(config) == 1:
        return False
    is_even = config.devices % config.parallel.hosts == 0
    return config.parallel.homes == Homes.shared or (config.parallel.homes == Homes.auto and is_even)


def warn_without_homes(config: DictConfig, mode: Mode, given: Collection[str]) -> None:
    """Warns of each key of `given`, those of the command line, that does nothing where devices share no homes."""
    if config.devices == 1 or shares_homes(config, mode):
        return
    for key in KEYS_OF_SHARED_HOMES:
        if key in given:
            logger.warning("%s has no effect: the devices of a host share no weights in this run", key)
