"""Sharers that share homes, as threads of one process: their collectives are copies between their tensors."""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from offload.sharing import links
from offload.sharing.cuda_driver import DriverError
from offload.sharing.sharers import Processes, SharerLostError, Sharers

# Longer than any of their calls takes.
LIMIT_S = 300


def homes_in_use(processes: Iterable[int] | None = None) -> set[str]:
    """Returns the numbers of the files of shared homes that `processes` map, by default any process of this system."""
    found = set()
    # Other tests that run now have homes of their own.
    own = None if processes is None else [Path(f"/proc/{number}/maps") for number in processes]
    for maps in Path("/proc").glob("[0-9]*/maps") if own is None else own:
        with suppress(OSError):
            found |= {line.split()[4] for line in maps.read_text().splitlines() if "memfd:homes" in line}
    return found


class _Table:
    """The values that the threads leave for each other."""

    def __init__(self, count: int):
        self.barrier = threading.Barrier(count, timeout=LIMIT_S)
        self.values: list[Any] = [None] * count

    def laid_down(self, place: int, value: Any) -> list[Any]:
        """Returns the values of all threads; each waits for the others."""
        self.values[place] = value
        self.barrier.wait()
        values = list(self.values)
        # Nobody lays down the next value before all have read this one.
        self.barrier.wait()
        return values


class ThreadSharers(Sharers):
    """`offload.sharing.sharers.Sharers` of a thread: number `number` of all."""

    def __init__(self, number: int, everyone: _Table, hosts: Sequence[_Table]):
        self.limit_s = LIMIT_S
        self.hosts, self.count = len(hosts), len(everyone.values) // len(hosts)
        self.number, self.rank = number, number % self.count
        self.first = number - self.rank
        self.gathers = self.sums = 0
        self._everyone, self._here = everyone, hosts[number // self.count]

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        found = self.laid_down(numbers) if everywhere else self._here.laid_down(self.rank, numbers)
        return [list(given) for given in found]

    def gather(self, whole: torch.Tensor, what: str) -> None:
        self.gathers += 1
        own = whole.chunk(self.count)[self.rank].clone()
        for part, given in zip(whole.chunk(self.count), self._here.laid_down(self.rank, own), strict=True):
            part.copy_(given)

    def sum(self, flat: torch.Tensor, what: str) -> None:
        self.sums += 1
        first, *others = self.laid_down(flat.clone())
        total = first.clone()
        for other in others:
            total += other
        flat.copy_(total)

    def laid_down(self, value: Any) -> list[Any]:
        """Returns the values of the threads of all hosts; each waits for the others."""
        return self._everyone.laid_down(self.number, value)

    def break_off(self) -> None:
        """Raises BrokenBarrierError in those of the host that wait, as an exchange does whose sharer has ended."""
        self._here.barrier.abort()

    def mend(self, met: threading.Barrier) -> None:
        """Makes the exchanges of the host possible again; all call it, and wait for each other at `met`."""
        met.wait()
        if not self.rank:
            self._here.barrier.reset()
        met.wait()


def as_sharers(count: int, work: Callable[[ThreadSharers], Any], hosts: int = 1) -> list[Any]:
    """Calls `work` in a thread for each of `count` sharers of each host; returns what they return.

    Raises the error of the first that fails.
    """
    everyone, tables = _Table(count * hosts), [_Table(count) for _ in range(hosts)]
    errors: list[BaseException] = []
    # As in the threads below: what the caller compares with is computed on one core, too.
    torch.set_num_threads(1)

    def guarded(number: int) -> Any:
        # A thread takes over the number of cores that an update of another sharer has set at that moment, and sums over
        # several cores are others than those of one.
        torch.set_num_threads(1)
        try:
            return work(ThreadSharers(number, everyone, tables))
        except BaseException as error:
            errors.append(error)
            for table in (everyone, *tables):
                table.barrier.abort()
            raise

    lost = Processes.lost

    def lost_or_failed(processes: Processes, rank: int, waited_s: float, limit_s: float) -> SharerLostError | None:
        # The process of all is still there.
        if errors:
            return SharerLostError(rank, "another thread has failed", hangs=False)
        return lost(processes, rank, waited_s, limit_s)

    with patch.object(Processes, "lost", lost_or_failed), ThreadPoolExecutor(count * hosts) as pool:
        results = [pool.submit(guarded, number) for number in range(count * hosts)]
    if errors:
        raise next((error for error in errors if not isinstance(error, threading.BrokenBarrierError)), errors[0])
    return [result.result(300) for result in results]


def use_collectives(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets sharers reach no memory of each other's devices: they exchange slices by collectives."""

    def unreachable(sharers: ThreadSharers) -> None:
        raise DriverError("no peer access")

    monkeypatch.setattr(links, "Peers", unreachable)
