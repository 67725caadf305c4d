"""The ranks of a run as the engine's `Sharers`, which share the homes of what streams, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from training.parallel.collectives import gather_into
from training.parallel.reduce import Sum

Attempt = Callable[[Callable[[], Any], str], Any]
"""makes a call for the purpose named, and turns the errors of torch.distributed into those of the run"""
Wait = Callable[[dist.Work, timedelta], None]


class GroupSharers:
    """`offload.Sharers` of the ranks of one run.

    Args:
        host: the group for exchanges inside a step, whose time limit finds a rank that hangs.
        patient: the group for exchanges between steps, and its time limit: rank 0 may load weights meanwhile.
        data: the group for tensors on the devices.
        add: sums a flat tensor over the ranks of `data`.
    """

    def __init__(
        self,
        host: dist.ProcessGroup,
        patient: tuple[dist.ProcessGroup, timedelta],
        data: dist.ProcessGroup,
        add: Sum,
        attempt: Attempt,
        wait: Wait,
    ):
        self.rank, self.count = host.rank(), host.size()
        self._host = host
        self._patient = patient
        self._data = data
        self._add = add
        self._attempt = attempt
        self._wait = wait

    def exchange(self, numbers: Sequence[int], what: str, patient: bool = False) -> list[list[int]]:
        own = torch.tensor(list(numbers), dtype=torch.int64, device="cpu")
        everyone = torch.empty(self.count * len(own), dtype=torch.int64, device="cpu")
        self._attempt(lambda: self._exchange(everyone, own, patient), what)
        return everyone.view(self.count, -1).tolist()

    def gather(self, whole: Tensor, what: str) -> None:
        own = whole.chunk(self.count)[self.rank]
        self._attempt(lambda: gather_into(whole, own, self._data), what)

    def sum(self, flat: Tensor, what: str) -> None:
        self._attempt(lambda: self._add(flat, self._data), what)

    def _exchange(self, everyone: Tensor, own: Tensor, patient: bool) -> None:
        if not patient:
            gather_into(everyone, own, self._host)
            return
        group, limit = self._patient
        self._wait(gather_into(everyone, own, group, later=True), limit)
