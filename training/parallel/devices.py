"""The device of each rank, and its part of the host's cores."""

from __future__ import annotations

import torch
from omegaconf import DictConfig

from offload import usable_cores
from training.errors import UserError
from training.profiling.hardware import resolve_device


def device_of(name: str, devices: int, local_rank: int) -> torch.device:
    """Returns the device of a rank for `device=name`, and makes it this process's GPU: that of its number, or the CPU.

    Raises UserError if there are too few GPUs.
    """
    device = resolve_device(name)
    if device.type != "cuda":
        return device
    count = torch.cuda.device_count()
    if count < devices:
        raise UserError(f"devices={devices}: torch finds {count}: give devices={count}, or device=cpu")
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def share_cores(devices: int) -> int:
    """Gives this process one of `devices` equal parts of the host's cores for torch's threads; returns their number."""
    cores = max(usable_cores() // devices, 1)
    torch.set_num_threads(min(torch.get_num_threads(), cores))
    return cores


def share_update_cores(config: DictConfig, cores: int) -> None:
    """Makes the optimizer of this process update on its own part of the host's cores, unless a number was given."""
    if "threads" in config.optimizer and config.optimizer.threads is None:
        config.optimizer.threads = max(cores - 1, 1)
