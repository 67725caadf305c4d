"""A driver of CUDA for threads of one process on the CPU: streams do at once what is queued, and wait as threads do."""

import ctypes
import time
from collections.abc import Sequence
from contextlib import nullcontext

import pytest
import torch

from offload.sharing import cuda_driver, remote_memory
from offload.sharing.remote_memory import has_come

LIMIT_S = 60


class FakeDriver:
    """Stands in for `offload.sharing.cuda_driver` and for what `CudaPeers` asks of torch."""

    def __init__(self) -> None:
        self.copies = 0
        self.closed: list[int] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("exported", "opened", "close", "queue_write", "queue_wait", "queue_copies", "check_complete"):
            monkeypatch.setattr(cuda_driver, name, getattr(self, name))
        monkeypatch.setattr(remote_memory, "current_stream_handle", lambda index: 0)
        monkeypatch.setattr(remote_memory, "lock_pages", lambda address, nbytes, device: None)
        monkeypatch.setattr(remote_memory, "unlock_pages", lambda address, device, wait: None)
        monkeypatch.setattr(torch.cuda, "MemPool", lambda: None)
        monkeypatch.setattr(torch.cuda, "use_mem_pool", lambda pool, device: nullcontext())
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())

    def check_complete(self) -> None:
        pass

    def exported(self, address: int) -> tuple[bytes, int]:
        base = address - address % 4096
        return base.to_bytes(cuda_driver.HANDLE_BYTES, "little"), address - base

    def opened(self, handle: bytes) -> int:
        return int.from_bytes(handle, "little")

    def close(self, base: int) -> None:
        self.closed.append(base)

    def queue_write(self, stream: int, address: int, value: int) -> None:
        ctypes.c_uint32.from_address(address).value = value

    def queue_wait(self, stream: int, address: int, value: int) -> None:
        deadline = time.monotonic() + LIMIT_S
        while not has_come(ctypes.c_uint32.from_address(address).value, value):
            assert time.monotonic() < deadline, "a stream waits for ever"
            time.sleep(1e-4)

    def queue_copies(self, stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
        for target, source, nbytes in copies:
            self.copies += 1
            ctypes.memmove(target, source, nbytes)
