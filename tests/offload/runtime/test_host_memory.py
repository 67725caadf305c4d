"""Host blocks have exact size, are page-locked where possible, and are returned to the system."""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import mmap
import os
import warnings

import psutil
import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.runtime.host_memory import ALIGNMENT_BYTES, HostArena, aligned, free_host_bytes
from tests.offload.helpers.models import Stack, attached


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
    arena.close()
    del block
    gc.collect()
    assert view.item() == 3


def test_an_empty_block_is_allowed():
    assert HostArena(torch.device("cpu")).allocate(0, "nothing").bytes.numel() == 0


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


def test_too_much_is_refused_with_the_size():
    with pytest.raises(MemoryError, match=r"weights of layer: 4194304\.00 GiB"):
        HostArena(torch.device("cpu")).allocate(2**52, "weights of layer")


def test_a_model_larger_than_free_memory_is_refused_before_anything_is_allocated(monkeypatch: pytest.MonkeyPatch):
    assert free_host_bytes() > 2**28
    monkeypatch.setattr("offload.runtime.host_memory.free_host_bytes", lambda: 10 * 2**10)
    model = Stack()
    parameters = [p.data_ptr() for p in model.parameters()]
    with (
        pytest.raises(MemoryError, match=r"0\.00 GiB of host memory are needed, 0\.00 GiB are free"),
        attached(BounceLinear(), model),
    ):
        pass
    assert [p.data_ptr() for p in model.parameters()] == parameters
    with torch.device("meta"):
        large = nn.Sequential(*(nn.Linear(2**16, 2**16) for _ in range(16)))
    monkeypatch.undo()
    with pytest.raises(MemoryError, match=r"512\.\d\d GiB of host memory are needed"), attached(BounceLinear(), large):
        pass
    assert all(p.is_meta for p in large.parameters())


def test_a_failed_page_lock_warns_once_and_leaves_blocks_pageable(monkeypatch: pytest.MonkeyPatch):
    class Runtime:
        @staticmethod
        def cudaHostRegister(*_: object) -> int:  # noqa: N802
            return 2

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    arena = HostArena(torch.device("cuda"))
    with pytest.warns(RuntimeWarning, match=r"page-locking weights .* failed with 2"):
        arena.allocate(4096, "weights")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        arena.allocate(4096, "gradients")
    assert (arena.pinned_bytes, arena.pageable_bytes) == (0, 8192)


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system cannot keep memory from a forked process")
def test_page_locked_memory_stays_with_its_process_until_it_is_unlocked(monkeypatch: pytest.MonkeyPatch):
    """A forked data loader must not take over the page that the device writes to, and leave a copy to the trainer."""

    class Runtime:
        @staticmethod
        def cudaHostRegister(*_: object) -> int:  # noqa: N802
            return 0

        @staticmethod
        def cudaHostUnregister(*_: object) -> int:  # noqa: N802
            return 0

    def readable_in_a_fork() -> bool:
        child = os.fork()
        if child == 0:
            faulthandler.disable()
            ctypes.string_at(address, 1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    arena = HostArena(torch.device("cuda"))
    block = arena.allocate(4096, "weights")
    address = block.bytes.data_ptr()
    assert not readable_in_a_fork()
    arena.close()
    assert readable_in_a_fork()
