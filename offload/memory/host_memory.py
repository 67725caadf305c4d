"""Host memory that copies use: page-locked blocks of exact size.

Pages are locked through the CUDA runtime, so that a device copies from and to them directly. No function here leaves an
error pending. The runtime keeps the error of a call that failed, and the next kernel launch would raise it, whoever
makes it.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol

import torch

from offload.knobs import GIB
from offload.memory.limits import free_host_bytes
from offload.torch_private.torch_internals import clear_cuda_error

# CUDA allocations start at multiples of it, and so do tensors inside a flat buffer, whatever their dtype.
ALIGNMENT_BYTES = 256
# cudaHostRegisterPortable: page-locked for every device.
PORTABLE = 1
MADV_HUGEPAGE = 14
# Not in Python's module. Of Linux 5.14: makes pages that can be written to, and leaves what is in those that are there.
MADV_POPULATE_WRITE = 23
# Of Linux 6.1: makes huge pages of small ones, whatever the system's settings say. What is in them stays.
MADV_COLLAPSE = 25
POPULATING_THREADS = 8
# A call holds a lock that a thread needs to start: with large pieces the first is done before the others have started.
POPULATED_AT_ONCE = 16 << 20
HUGE_PAGE_BYTES = 2 << 20

# The system provides private pages three times as fast as shared ones, which are Python's default.
PRIVATE = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_ANONYMOUS") else {}


def allocator_pinned_bytes() -> int:
    """Returns the bytes of page-locked host memory that torch's own allocator has, in use and kept, in this process."""
    statistics = torch.cuda.host_memory_stats() if torch.cuda.is_initialized() else {}
    return int(statistics.get("allocated_bytes.current", 0))


def aligned(nbytes: int, alignment: int = ALIGNMENT_BYTES) -> int:
    """Returns `nbytes` rounded up to the alignment of tensors inside a flat buffer."""
    return -(-nbytes // alignment) * alignment


class Pages(Protocol):
    """Memory that its maker has mapped, such as that which several processes share. An arena hands it out in order."""

    mapping: mmap.mmap

    def take(self, nbytes: int) -> memoryview:
        """Returns the next `nbytes`, from the start of a page. They keep the mapping alive. Raises MemoryError."""


class HostBlock:
    """A flat host buffer: `bytes` is a uint8 tensor of exactly the size asked for, starting at a page.

    `is_meta`: a block of a dry run, which runs on the meta device, and has no memory. `shared`: where the memory is
    taken from; without it the block is this process's own.
    """

    def __init__(self, nbytes: int, name: str, is_meta: bool = False, shared: Pages | None = None):
        self.name = name
        self.is_shared = shared is not None
        self.holding: _Holding | None = None
        if is_meta:
            # Made without an operation of torch: the memory tracker counts what operations make as device memory.
            nothing = torch.empty(0, dtype=torch.uint8, device="meta")
            self.bytes = nothing.set_(torch.UntypedStorage(nbytes, device="meta"))
            return
        # Tensors keep the view, and the view keeps the mapping. See the note in _Holding.
        if shared is None:
            self.mapping = mmap.mmap(-1, max(nbytes, 1), **PRIVATE)
            self.view = memoryview(self.mapping)
        else:
            self.mapping, self.view = shared.mapping, shared.take(max(nbytes, 1))
        self.bytes = torch.frombuffer(self.view, dtype=torch.uint8)[:nbytes]

    def piece(self, start: int, nbytes: int) -> torch.Tensor:
        """Returns bytes of the block, uint8, as a tensor with a storage of its own: just these bytes, no copy.

        So its users are its users alone, and a file of it has its bytes alone.
        """
        if self.bytes.is_meta:
            return self.bytes[start : start + nbytes]
        if not nbytes:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self.view, dtype=torch.uint8, count=nbytes, offset=start)

    def __str__(self) -> str:
        return self.name


# In a forked process: locked memory of its parent. It stays here, because freeing it would unmap its addresses.
_of_the_parent: list[mmap.mmap] = []


class _Holding:
    """The memory of one block, as its arena counts it: until it is released, or nobody uses it any more.

    [Note: the end of page-locked memory]

    Pages must be unlocked before they are unmapped, also where nobody closes the arena: after an exception, a mode is
    just dropped, and the garbage collector or the end of the process takes its memory. Python unmaps the pages of an
    `mmap` before it calls those who wait for its end by a weak reference. So all tensors keep a `memoryview` of the
    mapping instead. The finalizer of that view keeps the mapping itself, until it has unlocked the pages. It runs at
    exit too, while Python and CUDA are still whole.
    """

    def __init__(self, block: HostBlock, device: torch.device, among: set[_Holding]):
        self.nbytes = block.bytes.numel()
        self.is_locked = False
        self._device = device
        self._among = among
        self._process = os.getpid()
        among.add(self)
        if not block.bytes.is_meta:
            self._address, self._mapping, self._is_shared = block.bytes.data_ptr(), block.mapping, block.is_shared
            weakref.finalize(block.view, self._unlock, wait=True)

    def lock(self) -> str | None:
        """Page-locks the memory. Returns None, or why that failed, in words."""
        # Set before: an interrupt (Ctrl-C) may come right behind the call.
        self.is_locked = True
        populate(self._address, self.nbytes)
        refusal = lock_pages(self._address, self.nbytes, self._device)
        if refusal is None:
            # A forked process would share the pages until one of the two writes, and the device might keep the child's.
            self._advise("MADV_DONTFORK")
        self.is_locked = refusal is None
        return refusal

    def release(self) -> None:
        """Unlocks the memory, which stays mapped while tensors view it, and counts it no more. No copy may use it."""
        self._unlock(wait=False)

    def _unlock(self, wait: bool) -> None:
        self._among.discard(self)
        if not self.is_locked:
            return
        if os.getpid() != self._process:
            # The fork did not copy the pages. Other memory of this process may lie at their addresses by now.
            _of_the_parent.append(self._mapping)
            return
        unlock_pages(self._address, self._device, wait)
        self._advise("MADV_DOFORK")
        self.is_locked = False

    def _advise(self, advice: str) -> None:
        if self._is_shared:
            # A forked process shares these pages for good, whoever writes.
            return
        # Not every system has these. Without MADV_DONTFORK copies are right as long as nobody forks.
        with suppress(AttributeError, OSError):
            self._mapping.madvise(getattr(mmap, advice))


class HostArena:
    """The host memory of one attached model, page-locked in place where the device is a GPU.

    torch's own allocator of pinned memory rounds up to powers of two and never returns memory to the system. Locking
    pages that exist (cudaHostRegister) is exact, takes about 0.05 s a GiB, and copies are as fast. Where locking fails
    (`ulimit -l`, a container's limit, too little memory) the block stays pageable: copies are correct but slow, one
    warning is given, and the block counts in `pageable_bytes` instead of `pinned_bytes`.

    An arena keeps no memory alive. A block counts until it is released, or else until the last tensor that views it is
    gone; then its pages are unlocked.

    `shared`: blocks are taken from this memory, in their order. Its maker has checked that the host has room for it.
    """

    def __init__(self, device: torch.device, pin: bool = True, shared: Pages | None = None):
        self._device = device
        self._shared = shared
        self._pin = pin and device.type == "cuda"
        self._is_meta = device.type == "meta"
        self._holdings: set[_Holding] = set()

    @property
    def pinned_bytes(self) -> int:
        """The bytes of the blocks that are page-locked."""
        return self._bytes(locked=True)

    @property
    def pageable_bytes(self) -> int:
        """The bytes of the other blocks."""
        return self._bytes(locked=False)

    def over(self, memory: Pages) -> HostArena:
        """Returns an arena like this one that takes its blocks from `memory`."""
        return HostArena(self._device, self._pin, memory)

    def require(self, nbytes: int) -> None:
        """Raises MemoryError with both numbers if the host has less than `nbytes` free. Allocates nothing."""
        free = None if self._is_meta else free_host_bytes()
        if free is not None and nbytes > free:
            raise MemoryError(f"{nbytes / GIB:.2f} GiB of host memory are needed, {free / GIB:.2f} GiB are free")

    def allocate(self, nbytes: int, name: str) -> HostBlock:
        """Returns a zero-filled block of `nbytes`. Raises MemoryError naming the size if the host has no room."""
        try:
            if self._pin and self._shared is None:
                # Locking takes all pages at once. Where they are too many, the system may end the process.
                self.require(nbytes)
            block = HostBlock(nbytes, name, self._is_meta, self._shared)
        except (OSError, ValueError, MemoryError) as error:
            raise MemoryError(
                f"host memory for {name}: {nbytes / GIB:.2f} GiB could not be mapped ({error})"
            ) from error
        holding = block.holding = _Holding(block, self._device, self._holdings)
        if self._pin and nbytes:
            self._lock(holding, name)
        return block

    def release(self, block: HostBlock) -> None:
        """Unlocks one block and stops counting it. Its memory is freed with the last tensor that views it.

        The caller makes sure that no copy uses the block any more.
        """
        block.holding.release()

    def close(self) -> None:
        """Unlocks every block. Their memory stays as long as tensors view it. No copy may use one any more."""
        for holding in list(self._holdings):
            holding.release()

    def _bytes(self, locked: bool) -> int:
        # A list: at any time the garbage collector may end a holding, which takes itself from the set.
        return sum(holding.nbytes for holding in list(self._holdings) if holding.is_locked == locked)

    def _lock(self, holding: _Holding, name: str) -> None:
        locked_before = self.pinned_bytes
        refusal = holding.lock()
        if refusal is None:
            return
        self._pin = False
        warnings.warn(
            f"page-locking {name} ({holding.nbytes / GIB:.2f} GiB, after {locked_before / GIB:.2f} GiB) failed"
            f" with {refusal}: copies fall back to pageable memory, several times slower. Raise `ulimit -l` or the"
            " container's memory limit.",
            RuntimeWarning,
            stacklevel=3,
        )


def populate(address: int, nbytes: int, in_file: bool = False, threads: ThreadPoolExecutor | None = None) -> bool:
    """Makes the pages of `nbytes` at `address` in several `threads`, huge ones where the system has them.

    Returns whether all were made. cudaHostRegister and a first write would make them far slower, and do, or say why
    not, where this fails: for less than a huge page, elsewhere than on Linux, and where the host may have no room. The
    driver refuses then, where the system would end the process.

    `in_file`: they belong to a file in memory. The settings of most systems refuse huge pages to such a file, but not
    to who asks for each, and its addresses and places in the file are as far from a multiple of HUGE_PAGE_BYTES.
    """
    madvise = getattr(ctypes.CDLL(None), "madvise", None)
    if madvise is None or nbytes < HUGE_PAGE_BYTES or nbytes > (free_host_bytes(enough=nbytes) or 0):
        return False
    start, end = address - address % mmap.PAGESIZE, address + nbytes

    def advise(first: int, size: int, advice: int) -> bool:
        return madvise(ctypes.c_void_p(first), ctypes.c_size_t(min(size, end - first)), advice) == 0

    def make(first: int) -> bool:
        if in_file:
            # An empty part of a file is not made huge, one with a page is.
            for page in range(first, min(first + POPULATED_AT_ONCE, end), HUGE_PAGE_BYTES):
                advise(page, mmap.PAGESIZE, MADV_POPULATE_WRITE)
            advise(first, POPULATED_AT_ONCE, MADV_COLLAPSE)
        return advise(first, POPULATED_AT_ONCE, MADV_POPULATE_WRITE)

    advise(start, end - start, MADV_HUGEPAGE)
    threads = threads or _threads(os.getpid())
    return all(list(threads.map(make, range(start, end, POPULATED_AT_ONCE))))


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Returns the threads of a process that make pages. To start them for each block takes longer than its pages do."""
    return ThreadPoolExecutor(POPULATING_THREADS, "pages")


def lock_pages(address: int, nbytes: int, device: torch.device) -> str | None:
    """Locks the pages of `nbytes` at `address`. Returns None, or why the runtime refused, in words."""
    # Where another device is current, the call would make a context there, of hundreds of MiB.
    with torch.cuda.device(device):
        runtime = torch.cuda.cudart()
        code = runtime.cudaHostRegister(address, nbytes, PORTABLE)
        if int(code) == 0:
            return None
        clear_cuda_error()
        return f"{runtime.cudaGetErrorString(code)}, CUDA error {int(code)}"


def unlock_pages(address: int, device: torch.device, wait: bool) -> None:
    """Unlocks what `lock_pages` has locked at `address`; the pages must still be mapped.

    Unmapped first, they would stay locked for good: the runtime then refuses every later range that overlaps them.

    `wait`: blocks the host until `device` is idle before, because copies may be using the pages. The CUDA reference
    tells of no wait in cudaHostUnregister, and warns against relying on those that it makes ("API synchronization
    behavior"). A device that has failed makes no copies any more: its error is left to who uses it next.
    """
    # Whatever fails or interrupts the wait, the pages are about to go.
    with suppress(RuntimeError), torch.cuda.device(device):
        try:
            if wait:
                torch.cuda.synchronize(device)
        finally:
            if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
                clear_cuda_error()
