"""Host blocks have exact size, are page-locked where possible, and are returned to the system."""

import ctypes
import faulthandler
import gc
import mmap
import os
import signal
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable

import psutil
import pytest
import torch
from torch import nn

from offload.memory.host_memory import ALIGNMENT_BYTES, HostArena, aligned, lock_pages, populate, unlock_pages
from offload.modes.bounce_linear import BounceLinear
from tests import ROOT
from tests.offload.helpers.models import Stack, under
from tests.offload.helpers.page_locks import ALREADY_REGISTERED, FakeRuntime, is_mapped
from tests.offload.helpers.pages import pages_in_memory

GPU = torch.device("cuda")


def test_alignment():
    assert [aligned(n) for n in (0, 1, ALIGNMENT_BYTES, ALIGNMENT_BYTES + 1)] == [
        0, ALIGNMENT_BYTES, ALIGNMENT_BYTES, 2 * ALIGNMENT_BYTES,
    ]  # fmt: skip


def test_blocks_have_the_exact_size_and_outlive_the_arena():
    arena = HostArena(torch.device("cpu"))
    block = arena.allocate(5000, "weights")
    assert block.bytes.shape == (5000,)
    assert block.bytes.untyped_storage().nbytes() <= 2 * 4096
    assert not block.bytes.any()
    assert (arena.pinned_bytes, arena.pageable_bytes) == (0, 5000)
    view = block.bytes[:4].view(torch.float32).fill_(3)
    assert arena.allocate(0, "nothing").bytes.numel() == 0
    arena.close()
    del block
    gc.collect()
    assert view.item() == 3


def test_memory_goes_back_to_the_system():
    process = psutil.Process()
    arena = HostArena(torch.device("cpu"))
    before = process.memory_info().rss
    block = arena.allocate(64 * 2**20, "weights")
    block.bytes.fill_(1)
    assert process.memory_info().rss - before > 60 * 2**20
    del block, arena
    gc.collect()
    assert process.memory_info().rss - before < 8 * 2**20


@pytest.mark.parametrize("nbytes", [5000, 3 * 2**20 + 5000, 80 * 2**20])
def test_pages_are_made_before_they_are_locked(nbytes: int, runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch):
    at_lock: list[int] = []

    def register(address: int, size: int, flags: int) -> int:
        at_lock.append(pages_in_memory(address, size))
        return 0

    monkeypatch.setattr(runtime, "cudaHostRegister", register)
    HostArena(GPU).allocate(nbytes, "weights")
    assert at_lock == [-(-nbytes // mmap.PAGESIZE) if nbytes > 2**21 else 0]


def test_pages_that_the_host_may_not_have_are_left_to_the_driver(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch):
    made = []
    monkeypatch.setattr(
        runtime, "cudaHostRegister", lambda address, size, flags: made.append(pages_in_memory(address, size)) or 0
    )
    monkeypatch.setattr("offload.memory.host_memory.free_host_bytes", lambda **_: None)
    HostArena(GPU).allocate(8 * 2**20, "weights")
    assert made == [0]


def test_pages_of_memory_that_begins_anywhere_are_made():
    whole = torch.empty(12 * 2**20, dtype=torch.uint8)
    start = whole.data_ptr()
    populate(start + 100, whole.numel() - 100)
    first = start - start % mmap.PAGESIZE + mmap.PAGESIZE
    pages = (start + whole.numel() - first) // mmap.PAGESIZE
    assert pages_in_memory(first, pages * mmap.PAGESIZE) == pages


def test_pages_that_are_there_keep_what_is_in_them():
    block = HostArena(torch.device("cpu")).allocate(8 * 2**20, "weights")
    block.bytes[5000:] = 7
    populate(block.bytes.data_ptr(), block.bytes.numel())
    assert int(block.bytes[:5000].sum()) == 0
    assert bool((block.bytes[5000:] == 7).all())


def test_too_much_is_refused_with_the_size():
    with pytest.raises(MemoryError, match=r"weights of layer: 4194304\.00 GiB"):
        HostArena(torch.device("cpu")).allocate(2**52, "weights of layer")


def test_a_model_larger_than_free_memory_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offload.memory.host_memory.free_host_bytes", lambda **_: 10 * 2**10)
    model = Stack()
    parameters = [p.data_ptr() for p in model.parameters()]
    with (
        pytest.raises(MemoryError, match=r"0\.00 GiB of host memory are needed, 0\.00 GiB are free"),
        under(BounceLinear(), model),
    ):
        pass
    assert [p.data_ptr() for p in model.parameters()] == parameters
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(2**16, 2**16) for _ in range(16)))
    monkeypatch.undo()
    with pytest.raises(MemoryError, match=r"512\.\d\d GiB of host memory are needed"), under(BounceLinear(), large):
        pass
    assert all(p.is_meta for p in large.parameters())


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    runtime.install(monkeypatch)
    return runtime


def a_cycle_with(thing: object) -> None:
    cycle = [thing]
    cycle.append(cycle)


def test_a_failed_page_lock_warns_once_and_leaves_blocks_pageable(runtime: FakeRuntime):
    runtime.refusal = 2
    arena = HostArena(GPU)
    with pytest.warns(RuntimeWarning, match=r"page-locking weights .* failed with the text of 2, CUDA error 2"):
        block = arena.allocate(4096, "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.allocate(4096, "gradients")
    assert (arena.pinned_bytes, arena.pageable_bytes) == (0, 4096)
    assert runtime.calls == ["register", "clear"]
    assert runtime.pending == 0
    arena.release(block)
    arena.close()
    assert runtime.calls == ["register", "clear"]


def test_page_locks_are_counted_until_they_are_released(runtime: FakeRuntime):
    arena = HostArena(GPU)
    one, other = arena.allocate(5000, "weights"), arena.allocate(4096, "gradients")
    assert runtime.ranges == {one.bytes.data_ptr(): 5000, other.bytes.data_ptr(): 4096}
    assert (arena.pinned_bytes, arena.pageable_bytes) == (9096, 0)
    arena.release(one)
    assert (arena.pinned_bytes, arena.pageable_bytes) == (4096, 0)
    arena.close()
    assert (arena.pinned_bytes, arena.pageable_bytes) == (0, 0)
    assert runtime.ranges == {}
    # The caller has made sure that no copy uses them. The end of the memory unlocks nothing again.
    del one, other
    gc.collect()
    assert runtime.calls == ["register", "register", "unregister", "unregister"]


@pytest.mark.parametrize("pieces", [False, True])
@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_memory_is_unlocked_before_it_is_unmapped_when_its_last_tensor_goes(
    runtime: FakeRuntime, pieces: bool, in_a_cycle: bool
):
    arena = HostArena(GPU)
    block = arena.allocate(8192, "weights")
    address = block.bytes.data_ptr()
    view = block.piece(4096, 100) if pieces else block.bytes[4096:]
    del block
    gc.collect()
    assert runtime.ranges == {address: 8192}
    assert arena.pinned_bytes == 8192
    if in_a_cycle:
        a_cycle_with(view)
    del view
    gc.collect()
    assert runtime.calls == ["register", "synchronize", "unregister"]
    assert runtime.unmapped == []
    assert runtime.ranges == {}
    assert not is_mapped(address)
    assert arena.pinned_bytes == 0


def test_memory_of_a_dropped_arena_stays_locked_while_a_tensor_views_it(runtime: FakeRuntime):
    arena = HostArena(GPU)
    view = arena.allocate(4096, "weights").bytes[:4].view(torch.float32).fill_(3)
    del arena
    gc.collect()
    assert len(runtime.ranges) == 1
    assert view.item() == 3
    del view
    assert runtime.ranges == {}


def test_pageable_memory_that_nobody_uses_is_not_counted():
    arena = HostArena(torch.device("cpu"))
    kept, dropped = arena.allocate(4096, "weights"), arena.allocate(8192, "gradients")
    assert arena.pageable_bytes == 12288
    a_cycle_with(dropped)
    del dropped
    gc.collect()
    assert arena.pageable_bytes == kept.bytes.numel() == 4096


def test_an_interrupt_behind_the_lock_leaves_nothing_locked(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch):
    register = runtime.cudaHostRegister

    def interrupted(*arguments: int) -> int:
        register(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(runtime, "cudaHostRegister", interrupted)
    with pytest.raises(KeyboardInterrupt):
        HostArena(GPU).allocate(4096, "weights")
    gc.collect()
    assert runtime.ranges == {}
    assert runtime.unmapped == []


def test_more_than_is_free_is_not_locked(runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch):
    """The system would not refuse the pages but end the process."""
    monkeypatch.setattr("offload.memory.host_memory.free_host_bytes", lambda **_: 2**30)
    arena = HostArena(GPU)
    message = r"host memory for weights: 2\.00 GiB .*2\.00 GiB of host memory are needed, 1\.00 GiB are free"
    with pytest.raises(MemoryError, match=message):
        arena.allocate(2**31, "weights")
    assert runtime.calls == []
    assert (arena.pinned_bytes, arena.pageable_bytes) == (0, 0)


AT_EXIT = """
import atexit, sys
# Registered first, it is called last.
atexit.register(lambda: print(runtime.calls, runtime.unmapped, runtime.ranges, sys.is_finalizing()))

import pytest, torch
from offload.memory.host_memory import HostArena
from tests.offload.helpers.page_locks import FakeRuntime

runtime = FakeRuntime()
runtime.install(pytest.MonkeyPatch())
block = HostArena(torch.device("cuda")).allocate(4096, "weights")
block.itself = block
"""


@pytest.mark.slow
def test_memory_is_unlocked_at_exit_while_the_runtime_is_there():
    result = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.stdout == "['register', 'synchronize', 'unregister'] [] {} False\n"
    assert result.stderr == ""


@pytest.mark.parametrize("how", ["dropped", "released", "at exit"])
def test_a_forked_process_leaves_the_memory_of_its_parent_alone(runtime: FakeRuntime, how: str):
    arena = HostArena(GPU)
    block = arena.allocate(4096, "weights")
    address = block.bytes.data_ptr()

    def in_the_child() -> bool:
        nonlocal block
        # What the child maps next may lie where the parent's block is not.
        others = mmap_at(address)
        if how == "released":
            arena.close()
        if how == "at exit":
            weakref.finalize._exitfunc()
        del block
        gc.collect()
        return runtime.calls == ["register"] and (not others or ctypes.string_at(address, 4) == b"mine")

    assert in_a_fork(in_the_child)
    assert block.bytes[0] == 0
    arena.close()
    assert runtime.calls == ["register", "unregister"]


def mmap_at(address: int) -> bool:
    """Maps a page of its own at `address`, if nothing is there."""
    if is_mapped(address):
        return False
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    mapped = libc.mmap(address, 4096, mmap.PROT_READ | mmap.PROT_WRITE, flags, -1, 0)
    if mapped != address:
        return False
    ctypes.memmove(address, b"mine", 4)
    return True


def in_a_fork(check: Callable[[], bool]) -> bool:
    """Returns what `check` returns in a forked process; False if that process dies."""
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        signal.alarm(300)
        os._exit(0 if check() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system cannot keep memory from a forked process")
def test_page_locked_memory_stays_with_its_process_until_it_is_unlocked(runtime: FakeRuntime):
    """A forked data loader must not take over the page that the device writes to, and leave a copy to the trainer."""
    arena = HostArena(GPU)
    block = arena.allocate(4096, "weights")
    address = block.bytes.data_ptr()

    def readable() -> bool:
        return len(ctypes.string_at(address, 1)) == 1

    assert not in_a_fork(readable)
    arena.close()
    assert in_a_fork(readable)


def test_a_piece_has_a_storage_of_its_own_over_the_memory_of_the_block():
    block = HostArena(torch.device("cpu")).allocate(5000, "weights")
    piece, nothing = block.piece(512, 100), block.piece(512, 0)
    assert (piece.untyped_storage().nbytes(), nothing.untyped_storage().nbytes()) == (100, 0)
    piece.fill_(7)
    assert (block.bytes[512:612] == 7).all()
    assert block.bytes.sum() == 700
    del block
    gc.collect()
    assert (piece == 7).all()


# Page locks by themselves.


@pytest.fixture
def pages() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)


def test_a_refusal_is_told_and_leaves_no_error(runtime: FakeRuntime, pages: torch.Tensor):
    assert lock_pages(pages.data_ptr(), 8192, GPU) is None
    refusal = lock_pages(pages.data_ptr() + 4096, 4096, GPU)
    assert refusal == f"the text of {ALREADY_REGISTERED}, CUDA error {ALREADY_REGISTERED}"
    assert runtime.pending == 0


def test_unlocking_what_is_not_locked_leaves_no_error(runtime: FakeRuntime, pages: torch.Tensor):
    unlock_pages(pages.data_ptr(), GPU, wait=False)
    assert runtime.calls == ["unregister", "clear"]
    assert runtime.pending == 0


@pytest.mark.parametrize("error", [RuntimeError("an illegal memory access"), KeyboardInterrupt()])
def test_pages_are_unlocked_also_where_the_wait_fails(
    runtime: FakeRuntime, pages: torch.Tensor, monkeypatch: pytest.MonkeyPatch, error: BaseException
):
    def fail(device: torch.device) -> None:
        raise error

    monkeypatch.setattr(torch.cuda, "synchronize", fail)
    lock_pages(pages.data_ptr(), 8192, GPU)
    if isinstance(error, KeyboardInterrupt):
        with pytest.raises(KeyboardInterrupt):
            unlock_pages(pages.data_ptr(), GPU, wait=True)
    else:
        unlock_pages(pages.data_ptr(), GPU, wait=True)
    assert runtime.ranges == {}
