"""Waits for other processes of a host: they end when the number is there, and name a process that will not give it."""

from __future__ import annotations

import multiprocessing
import time
from pathlib import Path

import pytest

from offload.sharing.processes import Processes
from offload.sharing.sharers import SharerLostError
from tests.offload.helpers.sharers import ThreadSharers, as_sharers


class WithOther:
    """Sharers of this process and of `other`."""

    rank, count = 0, 2

    def __init__(self, other: int):
        self._other = other

    def exchange(self, numbers, what: str, patient: bool = False, everywhere: bool = False) -> list[list[int]]:
        started = int(Path(f"/proc/{self._other}/stat").read_text().rpartition(")")[2].split()[19])
        return [list(numbers), [self._other, started]]


def test_a_wait_ends_with_what_is_given():
    def work(sharers: ThreadSharers) -> list[int]:
        processes, given = Processes(sharers), iter((None, None, 7))
        return [processes.awaited(1 - sharers.rank, lambda: next(given), time.monotonic(), 300)]

    assert as_sharers(2, work) == [[7], [7]]


def test_a_process_that_has_ended_is_named():
    process = multiprocessing.get_context("fork").Process(target=time.sleep, args=(600,), daemon=True)
    process.start()
    try:
        processes = Processes(WithOther(process.pid))
        assert processes.lost(1, 1.0, 2.0) is None
        assert processes.lost(1, 3.0, 2.0).hangs
        with pytest.raises(SharerLostError, match=r"^rank 1 did not come within 0\.1 seconds$") as late:
            processes.awaited(1, lambda: None, time.monotonic(), 0.1)
        assert late.value.hangs
        process.kill()
        with pytest.raises(SharerLostError, match=f"^the process {process.pid} of rank 1 has ended$") as ended:
            processes.awaited(1, lambda: None, time.monotonic(), 300)
        assert (ended.value.rank, ended.value.hangs) == (1, False)
        process.join()
        assert not processes.lost(1, 3.0, 2.0).hangs
    finally:
        process.kill()
        process.join()
