"""Page-locking reports a refusal, waits for copies where it is asked to, and leaves no error of CUDA pending."""

from __future__ import annotations

import mmap

import pytest
import torch

from offload.memory.page_locks import lock_pages, unlock_pages
from tests.offload.helpers.page_locks import ALREADY_REGISTERED, FakeRuntime

GPU = torch.device("cuda")


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    runtime = FakeRuntime()
    runtime.install(monkeypatch)
    return runtime


@pytest.fixture
def pages() -> torch.Tensor:
    return torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)


def test_pages_are_locked_and_unlocked(runtime: FakeRuntime, pages: torch.Tensor):
    assert lock_pages(pages.data_ptr(), 8192, GPU) is None
    assert runtime.ranges == {pages.data_ptr(): 8192}
    unlock_pages(pages.data_ptr(), GPU, wait=False)
    assert runtime.ranges == {}
    assert runtime.calls == ["register", "unregister"]


def test_a_refusal_is_told_and_leaves_no_error(runtime: FakeRuntime, pages: torch.Tensor):
    assert lock_pages(pages.data_ptr(), 8192, GPU) is None
    refusal = lock_pages(pages.data_ptr() + 4096, 4096, GPU)
    assert refusal == f"the text of {ALREADY_REGISTERED}, CUDA error {ALREADY_REGISTERED}"
    assert runtime.pending == 0


def test_unlocking_what_is_not_locked_leaves_no_error(runtime: FakeRuntime, pages: torch.Tensor):
    unlock_pages(pages.data_ptr(), GPU, wait=False)
    assert runtime.calls == ["unregister", "clear"]
    assert runtime.pending == 0


def test_unlocking_waits_for_the_device_where_copies_may_run(runtime: FakeRuntime, pages: torch.Tensor):
    lock_pages(pages.data_ptr(), 8192, GPU)
    unlock_pages(pages.data_ptr(), GPU, wait=True)
    assert runtime.calls == ["register", "synchronize", "unregister"]


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
