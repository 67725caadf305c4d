"""Locks pages of the host in place, so that a device copies from and to them directly, through the CUDA runtime.

No function here leaves an error pending. The runtime keeps the error of a call that failed, and the next kernel launch
would raise it, whoever makes it.
"""

from __future__ import annotations

from contextlib import suppress

import torch

from offload.torch_private.torch_internals import clear_cuda_error

# cudaHostRegisterPortable: page-locked for every device.
PORTABLE = 1


def lock_pages(address: int, nbytes: int, device: torch.device) -> str | None:
    """Locks the pages of `nbytes` at `address`. Returns None, or why the runtime refused, in words."""
    # Where another device is current, the call would make a context there, of hundreds of MiB.
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(code) == 0:
            return None
        clear_cuda_error()
        return f"{runtime.cudaGetErrorString(code)}, CUDA error {int(code)}"


def unlock_pages(address: int, device: torch.device, wait: bool) -> None:
    """Unlocks what `lock_pages` has locked at `address`; the pages must still be mapped.

    Unmapped first, they would stay locked for good: the runtime then refuses every later range that overlaps them.

    `wait`: blocks the host until `device` is idle before, because copies may be using the pages. The CUDA reference
    tells of no wait in cudaHostUnregister, and warns against relying on those that it makes ("API synchronization
    behavior"). A device that has failed makes no copies any more: its error is left to who uses it next.
    """
    # Whatever fails or interrupts the wait, the pages are about to go.
    with suppress(RuntimeError), torch.cuda.device(device):
        try:
            if wait:
                torch.cuda.synchronize(device)
        finally:
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                clear_cuda_error()
