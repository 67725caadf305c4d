"""Memory that several processes map: the same bytes for all, out of reach of others, and gone with the last of them."""

from __future__ import annotations

import mmap
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from offload.memory.host_memory import HostArena
from offload.sharing import shared_memory
from offload.sharing.shared_memory import in_pages, share_memory
from offload.sharing.sharers import NO_SHARERS
from tests import ROOT
from tests.offload.helpers.open_files import open_files
from tests.offload.helpers.sharers import ThreadSharers, as_sharers, homes_in_use


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


HOLDER = """
import sys
from offload.sharing.sharers import NO_SHARERS
from offload.sharing.shared_memory import share_memory
memory = share_memory(NO_SHARERS, 2**27)
memory.take(2**27)[:] = bytes(2**27)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.mark.slow
def test_the_memory_is_gone_after_a_kill():
    """It has no name, so it ends with the last process that maps it."""
    command = [sys.executable, "-c", HOLDER]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            assert holder.stdout.readline() == "ready\n"
            files = homes_in_use([holder.pid])
            assert len(files) == 1
            resident = re.search(r"^RssShmem:\s*(\d+) kB", Path(f"/proc/{holder.pid}/status").read_text(), re.MULTILINE)
            assert int(resident[1]) >= 2**17
        finally:
            holder.kill()
    assert not files & homes_in_use()
