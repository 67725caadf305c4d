"""Sharers that share homes, as threads of one process: their collectives are copies between their tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

# Longer than any of their calls takes.
LIMIT_S = 30


class _Table:
    """What the threads lay down for each other."""

    def __init__(self, count: int):
        self.barrier = threading.Barrier(count, timeout=LIMIT_S)
        self.values: list[Any] = [None] * count


class ThreadSharers:
    """`offload.runtime.sharers.Sharers` of a thread."""

    def __init__(self, rank: int, count: int, table: _Table):
        self.rank, self.count = rank, count
        self.gathers = self.sums = 0
        self._table = table

    def exchange(self, numbers: Sequence[int], what: str, patient: bool = False) -> list[list[int]]:
        return [list(given) for given in self.laid_down(numbers)]

    def gather(self, whole: torch.Tensor, what: str) -> None:
        self.gathers += 1
        own = whole.chunk(self.count)[self.rank].clone()
        for part, given in zip(whole.chunk(self.count), self.laid_down(own), strict=True):
            part.copy_(given)

    def sum(self, flat: torch.Tensor, what: str) -> None:
        self.sums += 1
        first, *others = self.laid_down(flat.clone())
        flat.copy_(first)
        for other in others:
            flat += other

    def laid_down(self, value: Any) -> list[Any]:
        """Returns the values of all threads; each waits for the others."""
        self._table.values[self.rank] = value
        self._table.barrier.wait()
        values = list(self._table.values)
        # Nobody lays down the next value before all have read this one.
        self._table.barrier.wait()
        return values


def as_sharers(count: int, work: Callable[[ThreadSharers], Any]) -> list[Any]:
    """Calls `work` in a thread for each sharer; returns what they return. Raises the error of the first that fails."""
    table = _Table(count)
    errors: list[BaseException] = []

    def guarded(rank: int) -> Any:
        try:
            return work(ThreadSharers(rank, count, table))
        except BaseException as error:
            errors.append(error)
            table.barrier.abort()
            raise

    with ThreadPoolExecutor(count) as pool:
        results = [pool.submit(guarded, rank) for rank in range(count)]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [result.result() for result in results]
