"""The process group of a world of one, which systems made for several processes ask for."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

ENVIRONMENT = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
# The names among these that `join_alone` set.
_SET: set[str] = set()


def join_alone(device: torch.device) -> None:
    """Makes this process the only one of a process group: NCCL on a GPU, gloo on the CPU. `leave` ends it.

    Sets what launchers set in the environment, where nothing did.
    """
    missing = ENVIRONMENT.keys() - os.environ.keys()
    os.environ.update({name: ENVIRONMENT[name] for name in missing})
    _SET.update(missing)
    if not dist.is_initialized():
        backend = "nccl" if device.type == "cuda" else "gloo"
        of_device = {"device_id": torch.device("cuda", device.index or 0)} if device.type == "cuda" else {}
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, **of_device)


def leave() -> None:
    """Ends the process group, if there is one, and takes from the environment what `join_alone` set."""
    if dist.is_initialized():
        dist.destroy_process_group()
    for name in _SET:
        os.environ.pop(name, None)
    _SET.clear()
