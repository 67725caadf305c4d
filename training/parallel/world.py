"""The place of this process among the processes of a run, as torchrun or rank 0 writes it into the environment."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass

from omegaconf import DictConfig

from training.errors import UserError


@dataclass(frozen=True)
class World:
    """This process is number `rank` of `size`, and number `local_rank` of `local_size` on its machine."""

    rank: int
    size: int
    local_rank: int
    local_size: int

    @classmethod
    def of_environment(cls) -> World | None:
        """Reads torchrun's variables; None if they are not there. Raises UserError for several machines."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ:
            return None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        if local_size != size:
            raise UserError(
                f"WORLD_SIZE={size} with LOCAL_WORLD_SIZE={local_size}: a run has the devices of one machine: start"
                " torchrun with --nnodes 1"
            )
        return cls(rank, size, local_rank, local_size)

    @staticmethod
    def is_follower() -> bool:
        """Tells whether torchrun started this process as another rank than the first."""
        return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def settle_devices(config: DictConfig, world: World | None, overridden: Collection[str] = ()) -> None:
    """Writes torchrun's number of processes into `config.devices`.

    `overridden` are the keys that the command line gives. Raises UserError for a number of devices that contradicts it.
    """
    if world is None:
        return
    given = config.devices
    if given != world.size and (given != 1 or "devices" in overridden):
        raise UserError(
            f"devices={given}: torchrun started {world.size} processes: leave devices out, or start torchrun with"
            f" --nproc-per-node {given}"
        )
    if config.plan:
        raise UserError(f"plan=true: a plan computes nothing: give devices={world.size}, and leave torchrun out")
    config.devices = world.size


def is_torchrun() -> bool:
    """Tells whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
