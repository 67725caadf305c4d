"""Calls of the CUDA driver: errors in words, what an old driver lacks, and on a GPU what they do."""

import ctypes
import mmap
from types import SimpleNamespace

import pytest
import torch

from offload.memory.host_memory import lock_pages, unlock_pages
from offload.sharing import cuda_driver
from offload.sharing.cuda_driver import DriverError


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch):
    """Sets what the library is, or the error of loading it."""

    def loads(library: object) -> None:
        def cdll(name: str) -> object:
            if isinstance(library, Exception):
                raise library
            return library

        cuda_driver._driver.cache_clear()
        monkeypatch.setattr(ctypes, "CDLL", cdll)

    yield loads
    cuda_driver._driver.cache_clear()


class Function:
    def __init__(self, code: int):
        self.code = code

    def __call__(self, *arguments: object) -> int:
        return self.code


def error_text(code: int, text: object) -> int:
    text._obj.value = b"invalid argument"
    return 0


def test_without_a_driver_that_is_the_error(load):
    load(OSError("libcuda.so.1: no such file"))
    with pytest.raises(DriverError, match=r"^there is no CUDA driver: libcuda\.so\.1: no such file$"):
        cuda_driver.check_complete()


def test_an_old_driver_lacks_a_call(load):
    calls = {name: Function(0) for name in cuda_driver._ARGUMENTS}
    load(SimpleNamespace(**calls))
    cuda_driver.check_complete()
    del calls["cuMemcpyBatchAsync"]
    load(SimpleNamespace(**calls))
    with pytest.raises(DriverError, match=r"^the CUDA driver has no cuMemcpyBatchAsync: it is older than CUDA 12\.8$"):
        cuda_driver.check_complete()


def test_a_call_that_fails_says_why(load):
    load(SimpleNamespace(cuIpcCloseMemHandle=Function(1), cuGetErrorString=error_text))
    with pytest.raises(DriverError, match=r"^cuIpcCloseMemHandle failed: invalid argument \(1\)$"):
        cuda_driver.close(4096)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_wait_for_numbers_and_copies_come_after_them():
    cuda_driver.check_complete()
    device = torch.device("cuda", torch.cuda.current_device())
    first, second = torch.cuda.Stream(), torch.cuda.Stream()
    source, target = torch.zeros(2**20, device=device), torch.zeros(2**20, device=device)
    pages = torch.frombuffer(mmap.mmap(-1, 4096), dtype=torch.int32)
    assert lock_pages(pages.data_ptr(), 4096, device) is None
    try:
        # A kernel that is used for the first time is loaded, which waits for streams that wait.
        torch.cuda._sleep(1)
        source.fill_(1)
        torch.cuda.synchronize()
        cuda_driver.queue_wait(second.cuda_stream, pages.data_ptr() + 64, 3)
        half = source.nbytes // 2
        copies = [(target.data_ptr() + start, source.data_ptr() + start, half) for start in (0, half)]
        cuda_driver.queue_copies(second.cuda_stream, [*copies, (target.data_ptr(), 0, 0)])
        with torch.cuda.stream(first):
            torch.cuda._sleep(10**8)
            cuda_driver.queue_write(first.cuda_stream, pages.data_ptr() + 64, 2)
            source.fill_(7)
        first.synchronize()
        assert pages[16] == 2
        assert not second.query()
        cuda_driver.queue_write(first.cuda_stream, pages.data_ptr() + 64, 3)
        torch.cuda.synchronize()
        assert target.eq(7).all()
    finally:
        unlock_pages(pages.data_ptr(), device, wait=True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_address_is_exported_with_its_place_in_its_allocation():
    memory = torch.zeros(2**25, dtype=torch.uint8, device="cuda")
    handle, offset = cuda_driver.exported(memory.data_ptr())
    same, further = cuda_driver.exported(memory.data_ptr() + 1000)
    assert (same, further) == (handle, offset + 1000)
    assert len(handle) == cuda_driver.HANDLE_BYTES
