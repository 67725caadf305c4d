"""Memory that several processes map, and exchanges of numbers through it; a process that ends or hangs is named."""

import mmap
import multiprocessing
import os
import random
import signal
import stat
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch

from offload.memory import host_memory
from offload.memory.host_memory import HUGE_PAGE_BYTES, POPULATING_THREADS, HostArena
from offload.sharing import shared_memory
from offload.sharing.shared_memory import MOST_NUMBERS, ExchangeBoard, PagesAhead, in_pages, share_memory
from offload.sharing.sharers import NO_SHARERS, SharerLostError
from tests.offload.helpers.pages import can_collapse, huge_bytes, open_files, pages_in_memory
from tests.offload.helpers.sharers import LIMIT_S, ThreadSharers, as_sharers, homes_in_use


def test_sharers_see_the_same_bytes():
    def work(sharers: ThreadSharers) -> list[int]:
        arena = HostArena(torch.device("cpu"), shared=share_memory(sharers, 3 * mmap.PAGESIZE))
        first, second = arena.allocate(5000, "first"), arena.allocate(10, "second")
        assert not first.bytes.any()
        assert not second.bytes.any()
        sharers.laid_down(None)
        (first if sharers.rank else second).bytes.fill_(sharers.rank + 1)
        sharers.laid_down(None)
        return [first.bytes.unique().item(), second.bytes.unique().item(), first.bytes.data_ptr() % mmap.PAGESIZE]

    assert as_sharers(2, work) == [[2, 1, 0], [2, 1, 0]]


def test_memory_is_handed_out_in_whole_pages_until_it_ends():
    memory = share_memory(NO_SHARERS, 2 * mmap.PAGESIZE)
    assert [in_pages(0), in_pages(1), in_pages(mmap.PAGESIZE + 1)] == [mmap.PAGESIZE, mmap.PAGESIZE, 2 * mmap.PAGESIZE]
    memory.take(1)
    memory.take(mmap.PAGESIZE)
    with pytest.raises(MemoryError, match=r"^1 bytes of shared memory are needed, 0 are left$"):
        memory.take(1)


def test_each_sharer_makes_the_pages_of_one_part(monkeypatch: pytest.MonkeyPatch):
    made, parts, populate = threading.Lock(), {}, shared_memory.populate

    def noted(address: int, nbytes: int, in_file: bool) -> bool:
        with made:
            parts[address] = nbytes
        return populate(address, nbytes, in_file)

    monkeypatch.setattr(shared_memory, "populate", noted)
    size = 3 * 2**21

    def work(sharers: ThreadSharers) -> tuple[int, int]:
        block = HostArena(torch.device("cpu"), shared=share_memory(sharers, size)).allocate(size, "weights")
        return block.bytes.data_ptr(), pages_in_memory(block.bytes.data_ptr(), size)

    found = as_sharers(3, work)
    assert parts == {start + rank * 2**21: 2**21 for rank, (start, _) in enumerate(found)}
    assert [pages for _, pages in found] == [size // mmap.PAGESIZE] * 3


@pytest.mark.skipif(not can_collapse(), reason="this system makes no huge pages for who asks for each (Linux 6.1)")
def test_large_memory_has_huge_pages_in_all_processes():
    size = 3 * HUGE_PAGE_BYTES + 100

    # Two parts, of two huge pages each.
    whole = 4 * HUGE_PAGE_BYTES

    def work(sharers: ThreadSharers) -> tuple[int, int]:
        view = share_memory(sharers, size).take(size)
        view[sharers.rank * HUGE_PAGE_BYTES] = 1
        sharers.laid_down(None)
        # Reads map the pages that the other has made.
        return sum(view[:: mmap.PAGESIZE]), huge_bytes(torch.frombuffer(view, dtype=torch.uint8).data_ptr(), whole)

    assert as_sharers(2, work) == [(2, whole)] * 2


def test_a_range_over_the_parts_of_all_is_one():
    nbytes = 3 * mmap.PAGESIZE + 10

    def work(sharers: ThreadSharers) -> bytes:
        view = share_memory(sharers, nbytes).take(nbytes)
        if sharers.rank == 1:
            view[:] = bytes(number % 251 for number in range(nbytes))
        sharers.laid_down(None)
        return bytes(view)

    assert as_sharers(3, work) == [bytes(number % 251 for number in range(nbytes))] * 3


def test_pages_made_ahead_are_those_that_are_shared():
    size = 3 * HUGE_PAGE_BYTES
    part = 2 * HUGE_PAGE_BYTES

    def work(sharers: ThreadSharers) -> tuple[int, bool, int]:
        ahead = PagesAhead(sharers, size)
        # Nobody waits for another here.
        file = ahead.take()
        there = 512 * os.fstat(file).st_blocks
        ahead.take = lambda: file
        memory = share_memory(sharers, size, ahead)
        view = memory.take(size)
        assert not any(view[:: mmap.PAGESIZE])
        sharers.laid_down(None)
        view[sharers.rank * part] = 1
        sharers.laid_down(None)
        return there, memory.is_made, sum(view[:: mmap.PAGESIZE])

    before = open_files()
    assert as_sharers(2, work) == [(part, True, 2)] * 2
    assert not open_files() - before


def test_memory_that_the_host_has_no_room_for_is_only_promised(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(host_memory, "free_host_bytes", lambda **_: HUGE_PAGE_BYTES)
    assert not share_memory(NO_SHARERS, 2 * HUGE_PAGE_BYTES).is_made
    assert share_memory(NO_SHARERS, HUGE_PAGE_BYTES).is_made


def test_pages_made_ahead_that_nobody_takes_are_given_back(monkeypatch: pytest.MonkeyPatch):
    made, go_on = [], threading.Event()

    def slowly(address: int, nbytes: int, in_file: bool, threads: ThreadPoolExecutor) -> None:
        def make(page: int) -> None:
            made.append(page)
            go_on.wait(LIMIT_S)

        list(threads.map(make, range(100)))

    monkeypatch.setattr(shared_memory, "populate", slowly)
    before = open_files()
    ahead = PagesAhead(NO_SHARERS, 100 * HUGE_PAGE_BYTES)
    while len(made) < POPULATING_THREADS:
        time.sleep(0.01)
    threading.Timer(0.1, go_on.set).start()
    ahead.close()
    assert len(made) == POPULATING_THREADS
    assert not open_files() - before


def test_sharers_with_other_models_are_refused():
    with pytest.raises(RuntimeError, match=r"^rank 1 shares 20 bytes, rank 0 10"):
        as_sharers(2, lambda sharers: share_memory(sharers, 10 * (sharers.rank + 1)))


def test_the_file_has_no_name_and_is_its_user_s_alone(monkeypatch: pytest.MonkeyPatch):
    found = []
    made = shared_memory._made

    def watched(nbytes: int) -> int:
        descriptor = made(nbytes)
        status = os.fstat(descriptor)
        found.append((stat.S_IMODE(status.st_mode), status.st_nlink, status.st_uid, os.get_inheritable(descriptor)))
        return descriptor

    monkeypatch.setattr(shared_memory, "_made", watched)
    before = open_files()
    memory = share_memory(NO_SHARERS, 10)
    assert found == [(0o600, 0, os.getuid(), False)]
    # Python's mapping keeps one of its own.
    assert len(open_files() - before) == 1
    del memory
    assert not open_files() - before


def test_a_first_process_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch):
    class Second:
        rank, count = 1, 2

        def exchange(self, numbers, what, patient=False):
            return [[2**22 + 1, 3, numbers[2]], list(numbers)]

    with pytest.raises(
        RuntimeError, match=r"^the memory of rank 0 \(process 4194305\) cannot be opened \(No such file"
    ):
        share_memory(Second(), 10)


COUNT = 3


def test_each_gets_the_numbers_of_all_in_each_exchange():
    def work(sharers: ThreadSharers) -> list[list[list[int]]]:
        board, generator, found = ExchangeBoard(sharers), random.Random(sharers.rank), []
        for number in range(50):
            if generator.random() < 0.2:
                time.sleep(0.002)
            found.append(board.exchange([number, -(2**40), *[7] * sharers.rank], limit_s=300))
        return found

    for found in as_sharers(COUNT, work):
        assert found == [[[number, -(2**40), *[7] * rank] for rank in range(COUNT)] for number in range(50)]


def test_a_row_that_is_not_whole_is_not_read():
    """As another processor may see it that has the number of an exchange before its other words."""

    def work(sharers: ThreadSharers) -> None:
        board = ExchangeBoard(sharers)
        board.exchange([1, 2], limit_s=300)
        sharers.laid_down(None)
        if sharers.rank == 0:
            start = board._row(0)
            board._words[start + 2] = 9
            assert board._read(0) is None
            board._words[start + 1] = 2**40
            assert board._read(0) is None
        sharers.laid_down(None)

    as_sharers(2, work)


def test_more_numbers_than_a_row_has_are_refused():
    with pytest.raises(ValueError, match=r"^14 numbers are more than a row"):
        as_sharers(1, lambda sharers: ExchangeBoard(sharers).exchange([0] * (MOST_NUMBERS + 1), limit_s=1))


def _exchanging(rank: int, pipes: list[Any], found: Any) -> None:
    """Exchanges until another is lost; then says which, and whether it has ended."""
    board = ExchangeBoard(Meeting(rank, pipes))
    pipes[rank].send("ready")
    try:
        number = 0
        while True:
            number += 1
            assert board.exchange([number, rank], limit_s=300) == [[number, other] for other in range(COUNT)]
    except SharerLostError as error:
        found.send((error.rank, error.hangs))


class Meeting:
    """Sharers whose patient exchanges go through the process that has started them."""

    count, first, hosts = COUNT, 0, 1

    def __init__(self, rank: int, pipes: list[Any]):
        self.rank, self._pipe = rank, pipes[rank]

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        self._pipe.send(list(numbers))
        return received(self._pipe)


def received(pipe: Connection) -> Any:
    assert pipe.poll(300), "nothing came"
    return pipe.recv()


@pytest.mark.parametrize("seed", range(3))
def test_a_process_that_is_killed_at_any_moment_is_named_and_its_memory_is_gone(seed: int):
    generator, context = random.Random(seed), multiprocessing.get_context("fork")
    pipes, others = zip(*(context.Pipe() for _ in range(COUNT)), strict=True)
    reports = [context.Pipe() for _ in range(COUNT)]
    processes = [
        context.Process(target=_exchanging, args=(rank, others, reports[rank][1]), daemon=True) for rank in range(COUNT)
    ]
    before = homes_in_use()
    for process in processes:
        process.start()
    try:
        while (words := [received(pipe) for pipe in pipes]) != ["ready"] * COUNT:
            for pipe in pipes:
                pipe.send(words)
        files = homes_in_use(process.pid for process in processes) - before
        assert len(files) == COUNT
        lost = generator.randrange(COUNT)
        time.sleep(generator.uniform(0, 0.05))
        os.kill(processes[lost].pid, signal.SIGKILL)
        left = {*range(COUNT)} - {lost}
        found = {rank: received(reports[rank][0]) for rank in left}
        assert not any(hangs for _, hangs in found.values())
        # One that waits for both may see the end of the other first, which ends because of the one that was killed.
        assert lost in {named for named, _ in found.values()}
    finally:
        for process in processes:
            process.kill()
            process.join(300)
    assert not files & homes_in_use()
