"""Processes that share nothing, a meeting of those that do, and waits that name a process which will not come."""

import multiprocessing
import time
from pathlib import Path

import pytest
import torch

from offload.sharing.sharers import NO_SHARERS, Processes, SharerLostError, meet
from tests.offload.helpers.sharers import ThreadSharers, as_sharers


def test_without_sharers_nobody_is_waited_for():
    whole = torch.arange(4, dtype=torch.uint8)
    NO_SHARERS.gather(whole, "test")
    assert whole.tolist() == [0, 1, 2, 3]
    assert NO_SHARERS.exchange((1, 2), "test") == [[1, 2]]
    meet(NO_SHARERS, "test")


def test_a_meeting_ends_when_all_are_there():
    arrived = []

    def work(sharers: ThreadSharers) -> int:
        time.sleep(0.05 * sharers.rank)
        arrived.append(sharers.rank)
        meet(sharers, "test")
        return len(arrived)

    assert as_sharers(3, work) == [3, 3, 3]


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
        process.join(300)
        assert not processes.lost(1, 3.0, 2.0).hangs
    finally:
        process.kill()
        process.join(300)
