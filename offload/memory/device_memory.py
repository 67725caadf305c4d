"""The memory that is free on a device."""

from __future__ import annotations

import torch


def free_device_bytes(device: torch.device) -> int | None:
    """Returns the bytes that new tensors can take on `device`; None on a device that is not a GPU.

    They are the device's free memory, and the memory that torch's allocator holds for nobody.
    """
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused
