"""Collectives of torch.distributed under one name in all versions of torch."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed it.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_into(whole: Tensor, own: Tensor, group: dist.ProcessGroup, later: bool = False) -> dist.Work | None:
    """Fills `whole` with the slices `own` (1-D, one dtype) of all ranks, in their order; `own` may be its place in it.

    `later`: returns at once, with what to wait for.
    """
    return _gather(whole, own, group=group, async_op=later)
