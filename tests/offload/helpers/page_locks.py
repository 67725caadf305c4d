"""CUDA runtimes that keep account of page-locked memory: a fake one, and the real one."""

from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from offload.memory import host_memory
from offload.memory.host_memory import HostArena

ALREADY_REGISTERED = 712
NOT_REGISTERED = 713


def is_mapped(address: int) -> bool:
    """Tells whether this process has memory at `address`."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        start, end = (int(bound, 16) for bound in line.split(maxsplit=1)[0].split("-"))
        if start <= address < end:
            return True
    return False


class FakeRuntime:
    """Stands in for the CUDA runtime on a machine without one.

    `ranges` are the registered ranges, by address. As under CUDA, a range that overlaps one of them is refused, and a
    failed call leaves its error in `pending`. `refusal` is an error with which every range is refused. `calls` are the
    calls in their order, `unmapped` the addresses that were unregistered when nothing was mapped there any more.
    """

    def __init__(self, refusal: int = 0):
        self.refusal = refusal
        self.ranges: dict[int, int] = {}
        self.calls: list[str] = []
        self.unmapped: list[int] = []
        self.pending = 0

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the runtime in the place of CUDA's, for arenas on a cuda device."""
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: self.calls.append("synchronize"))
        monkeypatch.setattr(host_memory, "clear_cuda_error", self._clear)

    def install_for_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As `install`, and has the arenas of modes that run on the CPU lock their pages, too."""
        self.install(monkeypatch)
        is_real = property(lambda arena: not arena._is_meta, lambda arena, pin: None)
        monkeypatch.setattr(HostArena, "_pin", is_real, raising=False)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        self.calls.append("register")
        overlaps = any(start < address + nbytes and address < start + size for start, size in self.ranges.items())
        self.pending = ALREADY_REGISTERED if overlaps else self.refusal
        if not self.pending:
            self.ranges[address] = nbytes
        return self.pending

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append("unregister")
        if not is_mapped(address):
            # It stays registered then, and so refused.
            self.unmapped.append(address)
        elif self.ranges.pop(address, None) is not None:
            return 0
        self.pending = NOT_REGISTERED
        return self.pending

    def cudaGetErrorString(self, code: int) -> str:  # noqa: N802
        return f"the text of {code}"

    def _clear(self) -> None:
        self.calls.append("clear")
        self.pending = 0


class RecordedRuntime:
    """The real CUDA runtime, which keeps account as `FakeRuntime` does. `refused` counts refused registrations.

    `refuse` makes it refuse every range, for real: the range is registered already. `on_unregister` is called before a
    range is unregistered.
    """

    def __init__(self, refuse: bool = False):
        self.ranges: dict[int, int] = {}
        self.unmapped: list[int] = []
        self.refused = 0
        self.on_unregister: Callable[[], None] = lambda: None
        self._refuse = refuse
        self._real = torch.cuda.cudart()

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Puts the account before the runtime."""
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def __getattr__(self, name: str) -> object:
        return getattr(self._real, name)

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> object:  # noqa: N802
        if self._refuse:
            assert int(self._real.cudaHostRegister(address, nbytes, flags)) == 0
        code = self._real.cudaHostRegister(address, nbytes, flags)
        if int(code) == 0:
            self.ranges[address] = nbytes
        else:
            self.refused += 1
        if self._refuse:
            # It leaves the address as it was, and the error of the call before pending.
            assert int(self._real.cudaHostUnregister(address)) == 0
        return code

    def cudaHostUnregister(self, address: int) -> object:  # noqa: N802
        self.on_unregister()
        if not is_mapped(address):
            self.unmapped.append(address)
        code = self._real.cudaHostUnregister(address)
        if int(code) == 0:
            del self.ranges[address]
        return code
