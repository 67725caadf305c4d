"""Host memory that copies use: page-locked blocks of exact size."""

from __future__ import annotations

import mmap
import warnings
from contextlib import suppress
from pathlib import Path

import torch

from offload.runtime.byte_sizes import GIB

# CUDA allocations start at multiples of it, and so do tensors inside a flat buffer, whatever their dtype.
ALIGNMENT_BYTES = 256

# The system provides private pages three times as fast as shared ones, which are Python's default.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def aligned(nbytes: int) -> int:
    """Returns `nbytes` rounded up to the alignment of tensors inside a flat buffer."""
    return -(-nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


class HostBlock:
    """A flat host buffer: `bytes` is a uint8 tensor of exactly the size asked for, starting at a page.

    `is_meta`: a block of a dry run, which runs on the meta device, and has no memory.
    """

    def __init__(self, nbytes: int, name: str, is_meta: bool = False):
        self.name = name
        if is_meta:
            # Made without an operation of torch: the memory tracker counts what operations make as device memory.
            nothing = torch.empty(0, dtype=torch.uint8, device="meta")
            self.bytes = nothing.set_(torch.UntypedStorage(nbytes, device="meta"))
            return
        self.mapping = mmap.mmap(-1, max(nbytes, 1), **PRIVATE)
        self.bytes = torch.frombuffer(self.mapping, dtype=torch.uint8)[:nbytes]

    def piece(self, start: int, nbytes: int) -> torch.Tensor:
        """Returns bytes of the block, uint8, as a tensor with a storage of its own: whose users are its users alone."""
        if self.bytes.is_meta or not nbytes:
            return self.bytes[start : start + nbytes]
        return torch.frombuffer(self.mapping, dtype=torch.uint8, count=nbytes, offset=start)

    def __str__(self) -> str:
        return self.name


class HostArena:
    """The host memory of one attached model, page-locked in place where the device is a GPU.

    torch's own allocator of pinned memory rounds up to powers of two and never returns memory to the system. Locking
    pages that exist (cudaHostRegister) is exact, takes about 0.05 s a GiB, and copies are as fast. Where locking fails
    (`ulimit -l`, a container's limit, too little memory) the block stays pageable: copies are correct but slow, one
    warning is given, and the block counts in `pageable_bytes` instead of `pinned_bytes`.
    """

    def __init__(self, device: torch.device, pin: bool = True):
        self.pinned_bytes = 0
        self.pageable_bytes = 0
        self._pin = pin and device.type == "cuda"
        self._is_meta = device.type == "meta"
        self._locked: dict[HostBlock, None] = {}

    def require(self, nbytes: int) -> None:
        """Raises MemoryError with both numbers if the host has less than `nbytes` free. Allocates nothing."""
        free = None if self._is_meta else free_host_bytes()
        if free is not None and nbytes > free:
            raise MemoryError(f"{nbytes / GIB:.2f} GiB of host memory are needed, {free / GIB:.2f} GiB are free")

    def allocate(self, nbytes: int, name: str) -> HostBlock:
        """Returns a zero-filled block of `nbytes`. Raises MemoryError naming the size if the host has no room."""
        try:
            block = HostBlock(nbytes, name, self._is_meta)
        except (OSError, ValueError) as error:
            raise MemoryError(f"host memory for {name}: {nbytes / GIB:.2f} GiB could not be mapped") from error
        if self._pin and nbytes and self._lock_pages(block):
            self.pinned_bytes += nbytes
            self._locked[block] = None
        else:
            self.pageable_bytes += nbytes
        return block

    def release(self, block: HostBlock) -> None:
        """Unlocks one block and stops counting it. Its memory is freed with the last tensor that views it.

        The caller makes sure that no copy uses the block any more.
        """
        if block in self._locked:
            del self._locked[block]
            self._unlock_pages(block)
            self.pinned_bytes -= block.bytes.numel()
        else:
            self.pageable_bytes -= block.bytes.numel()

    def close(self) -> None:
        """Unlocks every block. Their memory stays as long as tensors view it."""
        for block in self._locked:
            self._unlock_pages(block)
        self._locked.clear()
        self.pinned_bytes = self.pageable_bytes = 0

    def _lock_pages(self, block: HostBlock) -> bool:
        nbytes = block.bytes.numel()
        # 1 is cudaHostRegisterPortable: page-locked for every device.
        code = torch.cuda.cudart().cudaHostRegister(block.bytes.data_ptr(), nbytes, 1)
        if int(code) == 0:
            # A forked process would share the pages until one of the two writes, and the device might keep the child's.
            _advise(block, "MADV_DONTFORK")
            return True
        warnings.warn(
            f"page-locking {block.name} ({nbytes / GIB:.2f} GiB, after {self.pinned_bytes / GIB:.2f} GiB) failed"
            f" with {code}: copies fall back to pageable memory, several times slower. Raise `ulimit -l` or the"
            " container's memory limit.",
            RuntimeWarning,
            stacklevel=3,
        )
        self._pin = False
        return False

    @staticmethod
    def _unlock_pages(block: HostBlock) -> None:
        torch.cuda.cudart().cudaHostUnregister(block.bytes.data_ptr())
        _advise(block, "MADV_DOFORK")


def _advise(block: HostBlock, advice: str) -> None:
    # Not every system has it. Without it copies are right as long as nobody forks.
    with suppress(AttributeError, OSError):
        block.mapping.madvise(getattr(mmap, advice))


def free_host_bytes() -> int | None:
    """Returns how many bytes this process can still allocate: the least that the system and its control group allow.

    Returns None where neither is known.
    """
    limits = []
    with suppress(OSError, ValueError, IndexError):
        fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        limits.append(int(fields["MemAvailable"].split()[0]) * 1024)
    with suppress(OSError, ValueError):
        group = Path("/sys/fs/cgroup")
        limits.append(int((group / "memory.max").read_text()) - int((group / "memory.current").read_text()))
    return min(limits, default=None)
