"""The place of this process among the processes of a run, as torchrun or rank 0 writes it into the environment."""

import os
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

from omegaconf import DictConfig, OmegaConf

from training.errors import UserError
from training.visible_text import visible


@dataclass(frozen=True)
class World:
    """This process is number `rank` of `size`, and number `local_rank` of `local_size` on host `host` of `hosts`."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    host: int = 0
    hosts: int = 1

    @classmethod
    def of_environment(cls) -> Self | None:
        """Reads torchrun's variables; None if they are not there, or of one process that torchrun did not start."""
        if "RANK" not in os.environ or "WORLD_SIZE" not in os.environ or _is_alone():
            return None
        rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        local_rank = int(os.environ.get("LOCAL_RANK", rank))
        local_size = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        # torchrun calls a host a group.
        host = int(os.environ.get("GROUP_RANK", rank // local_size))
        hosts = int(os.environ.get("GROUP_WORLD_SIZE", -(-size // local_size)))
        return cls(rank, size, local_rank, local_size, host, hosts)

    @staticmethod
    def is_follower() -> bool:
        """Tells whether torchrun started this process as another rank than the first."""
        return "WORLD_SIZE" in os.environ and os.environ.get("RANK", "0") != "0"


def settle_devices(config: DictConfig, world: World | None, overridden: Collection[str] = ()) -> None:
    """Writes torchrun's numbers into `config`. Raises UserError for other `overridden` ones, and hosts without it."""
    if world is None:
        # Before `check`, which names a section that was left out.
        hosts = OmegaConf.select(config, "parallel.hosts") or 1
        if hosts > 1 and not config.plan:
            raise UserError(
                f"parallel.hosts={hosts}: this process can start ranks on its own host only: start one"
                " torchrun on each host, as scripts/slurm.sbatch does, or give parallel.hosts=1"
            )
        return
    given = config.devices
    if given != world.size and (given != 1 or "devices" in overridden):
        raise UserError(
            f"devices={given}: torchrun started {world.size} processes: leave devices out, or start torchrun with"
            " as many"
        )
    if config.parallel.hosts != world.hosts and "parallel.hosts" in overridden:
        raise UserError(f"parallel.hosts={config.parallel.hosts}: torchrun started {world.hosts}: leave it out")
    if config.plan:
        raise UserError(f"plan=true: a plan computes nothing: give devices={world.size}, and leave torchrun out")
    config.devices, config.parallel.hosts = world.size, world.hosts


def ranks_of_host(config: DictConfig) -> int:
    """Returns the ranks on one host of the run, the one with the most."""
    return -(-config.devices // config.parallel.hosts)


def row_shares(config: DictConfig) -> int:
    """Returns into how many shares the sequences of a step are divided, one for each rank that has whole ones."""
    return config.devices // config.parallel.sequence


def refuse_other_launchers() -> None:
    """Raises UserError for a rank that another launcher than torchrun has started: its ranks may wait in other ways."""
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not is_torchrun() and not _is_alone():
        rank, size = visible(os.environ["RANK"]), visible(os.environ["WORLD_SIZE"])
        raise UserError(
            f"RANK={rank} WORLD_SIZE={size}: these variables are set, and torchrun did not start this process: start it"
            " with torchrun, or unset them and give devices=N"
        )


def refuse_sweep() -> None:
    """Raises UserError if torchrun has started several processes: the first job of a sweep would end the others."""
    world = World.of_environment()
    if world is not None and world.size > 1:
        raise UserError(
            f"a sweep (-m) under torchrun, with {world.size} processes: leave torchrun out, and give"
            f" devices={world.size}: each job starts its own"
        )


def _is_alone() -> bool:
    """Tells whether this process is one of one, as some shells say of themselves."""
    return os.environ["WORLD_SIZE"] == "1" and not is_torchrun()


def is_torchrun() -> bool:
    """Tells whether torchrun started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ
