"""What all ranks know before they are connected."""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist


@dataclass(frozen=True)
class Setup:
    """The keys that all ranks know before they are connected: `device`, `devices` and those of `parallel`."""

    device: str = "cpu"
    devices: int = 1
    timeout_s: float = 600
    numa: str = "auto"

    def shared(self) -> Setup:
        """Returns the setup of rank 0, on every rank."""
        found = [self]
        dist.broadcast_object_list(found, src=0)
        return found[0]
