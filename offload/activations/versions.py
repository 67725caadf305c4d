"""Version counters of tensors: how a write in place to a saved tensor is noticed without keeping its memory.

Autograd advances a tensor's counter at each write in place. Views of a tensor share its counter, as a rule.
"""

from __future__ import annotations

import torch

from offload.torch_private.torch_internals import set_versions


def share_version(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Returns whether two tensors have the same version counter, so that a write to one is counted at both."""
    version = one._version
    before = other._version
    set_versions((one,), (version + 1,))
    shared = other._version != before
    set_versions((one,), (version,))
    return shared


class VersionHandles:
    """Makes empty tensors that share the version counter of another tensor, and none of its memory."""

    def __init__(self, device: torch.device):
        self._device = device
        self._empty: dict[torch.dtype, torch.Tensor] = {}

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Returns an empty tensor of the same dtype that shares the counter of `tensor`."""
        if tensor.dtype not in self._empty:
            self._empty[tensor.dtype] = torch.empty(0, dtype=tensor.dtype, device=self._device)
        handle = tensor.detach()
        # Assigning `data` replaces the memory of a tensor, and keeps the counter that it shares with the original.
        handle.data = self._empty[tensor.dtype]
        return handle
