"""Calls of the CUDA driver that torch has no name for: how devices of several processes reach each other.

A process opens device memory of another (cuIpc...), streams of both wait for numbers in memory of the host
(cuStreamWaitValue32), and copies leave the multiprocessors alone where the driver would rather use them
(CU_MEMCPY_FLAG_PREFER_OVERLAP_WITH_COMPUTE, since CUDA 12.8). All are described in the CUDA Driver API. The current
context of the calling thread has to be that of the device, as after any work that torch queued there.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence

LIBRARY = "libcuda.so.1"
HANDLE_BYTES = 64
# CUipcMem_flags, CUstreamWaitValue_flags: reached once the number, of 32 bits, is at least the value, going round.
LAZY_ENABLE_PEER_ACCESS, WAIT_VALUE_GEQ = 1, 0
# CUmemcpySrcAccessOrder and CUmemcpyFlags.
SOURCE_IN_STREAM_ORDER, PREFER_OVERLAP_WITH_COMPUTE = 1, 1


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_char * HANDLE_BYTES),)


class _CopyAttributes(ctypes.Structure):
    """CUmemcpyAttributes; locations of type 0 are left to the driver."""

    _fields_ = (
        ("source_access_order", ctypes.c_int),
        ("source_type", ctypes.c_int),
        ("source_id", ctypes.c_int),
        ("target_type", ctypes.c_int),
        ("target_id", ctypes.c_int),
        ("flags", ctypes.c_uint),
    )


_Pointer, _Size = ctypes.c_uint64, ctypes.c_size_t
_ARGUMENTS = {
    "cuIpcGetMemHandle": (ctypes.POINTER(_Handle), _Pointer),
    "cuIpcOpenMemHandle_v2": (ctypes.POINTER(_Pointer), _Handle, ctypes.c_uint),
    "cuIpcCloseMemHandle": (_Pointer,),
    "cuMemGetAddressRange_v2": (ctypes.POINTER(_Pointer), ctypes.POINTER(_Size), _Pointer),
    "cuStreamWriteValue32_v2": (ctypes.c_void_p, _Pointer, ctypes.c_uint32, ctypes.c_uint),
    "cuStreamWaitValue32_v2": (ctypes.c_void_p, _Pointer, ctypes.c_uint32, ctypes.c_uint),
    "cuMemcpyBatchAsync": (
        ctypes.POINTER(_Pointer), ctypes.POINTER(_Pointer), ctypes.POINTER(_Size), _Size,
        ctypes.POINTER(_CopyAttributes), ctypes.POINTER(_Size), _Size, ctypes.POINTER(_Size), ctypes.c_void_p,
    ),
}  # fmt: skip
_BESIDE_COMPUTE = _CopyAttributes(SOURCE_IN_STREAM_ORDER, 0, 0, 0, 0, PREFER_OVERLAP_WITH_COMPUTE)


class DriverError(RuntimeError):
    """A call of the driver failed, or the driver does not have it."""


def check_complete() -> None:
    """Raises DriverError if this host has no driver, or one without some of the calls."""
    driver = _driver()
    if missing := [name for name in _ARGUMENTS if not hasattr(driver, name)]:
        raise DriverError(f"the CUDA driver has no {missing[0]}: it is older than CUDA 12.8")


def exported(address: int) -> tuple[bytes, int]:
    """Returns a handle of the allocation (cudaMalloc's) in which `address` lies, and the offset of it there."""
    base, size, handle = _Pointer(), _Size(), _Handle()
    _call("cuMemGetAddressRange_v2", ctypes.byref(base), ctypes.byref(size), address)
    _call("cuIpcGetMemHandle", ctypes.byref(handle), base)
    return bytes(handle), address - base.value


def opened(handle: bytes) -> int:
    """Returns the address of another process's allocation in this one, for the current device; `close` it once."""
    base = _Pointer()
    _call("cuIpcOpenMemHandle_v2", ctypes.byref(base), _Handle.from_buffer_copy(handle), LAZY_ENABLE_PEER_ACCESS)
    return base.value


def close(base: int) -> None:
    """Gives back what `opened` returned."""
    _call("cuIpcCloseMemHandle", base)


def queue_write(stream: int, address: int, value: int) -> None:
    """Queues on `stream` (its handle) that a number of 32 bits in page-locked memory becomes `value`.

    Whoever sees it sees all that the stream has written before.
    """
    _call("cuStreamWriteValue32_v2", stream, address, value, 0)


def queue_wait(stream: int, address: int, value: int) -> None:
    """Makes the later work of `stream` wait until such a number is at least `value`, going round at 2^32."""
    _call("cuStreamWaitValue32_v2", stream, address, value, WAIT_VALUE_GEQ)


def queue_copies(stream: int, copies: Sequence[tuple[int, int, int]]) -> None:
    """Queues copies on `stream`, in any order, beside what the current device computes.

    Each is the address of its target and of its source, both of which the device reaches, and its bytes.
    """
    copies = [copy for copy in copies if copy[2]]
    if not copies:
        return
    count = len(copies)
    targets, sources, sizes = zip(*copies, strict=True)
    _call(
        "cuMemcpyBatchAsync", (_Pointer * count)(*targets), (_Pointer * count)(*sources), (_Size * count)(*sizes),
        count, ctypes.byref(_BESIDE_COMPUTE), (_Size * 1)(0), 1, ctypes.byref(_Size()), stream,
    )  # fmt: skip


def _call(name: str, *arguments: object) -> None:
    driver = _driver()
    if code := getattr(driver, name)(*arguments):
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise DriverError(f"{name} failed: {(text.value or b'').decode() or 'unknown error'} ({code})")


@functools.cache
def _driver() -> ctypes.CDLL:
    try:
        driver = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise DriverError(f"there is no CUDA driver: {error}") from error
    for name, arguments in _ARGUMENTS.items():
        if hasattr(driver, name):
            getattr(driver, name).argtypes = arguments
    return driver
