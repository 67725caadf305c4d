"""Collectives of torch.distributed: under one name in all versions of torch, ended early, and their errors in short."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress

import torch.distributed as dist
from torch import Tensor

# torch 2.13 has renamed it.
_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def gather_into(whole: Tensor, own: Tensor, group: dist.ProcessGroup, later: bool = False) -> dist.Work | None:
    """Fills `whole` with the slices `own` (1-D, one dtype) of all ranks, in their order; `own` may be its place in it.

    `later`: returns at once, with what to wait for.
    """
    return _gather(whole, own, group=group, async_op=later)


def end_collectives(groups: Iterable[dist.ProcessGroup]) -> None:
    """Ends what NCCL `groups` have queued, because a rank is lost: else the device would wait for it for ever, and the
    end of the run for the device. What is computed from then on is wrong."""
    for group in groups:
        # The group may have ended by itself.
        with suppress(RuntimeError):
            group.abort()


def first_sentence(text: str) -> str:
    """Returns the first sentence of an error of torch's, without the place in its source; gloo adds much advice."""
    sentence = re.sub(r"^\[[^]]*\]", "", " ".join(text.split())).strip()
    return re.split(r"\.\s", sentence)[0][:120].rstrip(".")
