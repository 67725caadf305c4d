"""The AdamW update of one parameter (Loshchilov and Hutter 2019), and the choice of the kernel that computes it.

Both kernels read the gradient, update float32 master and moments, and write the weight. `FusedUpdate` is torch's own
kernel on tiles that stay in the host's cache; it works on any device and dtype. `NativeUpdate` is one C loop, compiled
at start-up where there is a compiler: one pass over memory, 28 bytes a parameter with bf16 weights and float32 states.
A torch.compile'd function is as fast, but holds Python's global lock for as long as it computes, so that a thread that
updates would stop the one that launches work for the GPU.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import math
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from offload.runtime.torch_internals import fused_adamw_

# Elements updated at a time. On the host, converted values then stay in the cache, which is three times as fast as a
# copy of a whole large gradient. A GPU needs larger pieces, and has 64 MiB to spare for scratch.
HOST_TILE = 1 << 21
DEVICE_TILE = 1 << 24

# Elements on which a kernel is measured: more than caches hold, and some milliseconds of work.
SAMPLE = 1 << 24

# Additions and products are contracted only where the kernel's source says so. sqrt must not set errno, or it would not
# be vectorised.
FLAGS = ("-O3", "-march=native", "-std=c11", "-ffp-contract=off", "-fno-math-errno", "-fopenmp", "-fPIC", "-shared")

logger = logging.getLogger(__name__)


class HyperParameters(NamedTuple):
    """The hyper-parameters of one update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


@dataclass(frozen=True)
class Operands:
    """The tensors that an update reads and writes: five, 1-D, contiguous, of equal length, on one device.

    `weight` and `gradient` are of any floating dtype, `master` is float32 (`weight` itself where that is float32),
    the moments are float32 or bfloat16: computed in float32 and stored rounded to nearest.
    """

    weight: Tensor
    gradient: Tensor
    master: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor

    @property
    def in_place(self) -> bool:
        """True if the weight is its own master."""
        return self.weight.data_ptr() == self.master.data_ptr()

    def split(self, size: int) -> Iterator[Operands]:
        """Yields pieces of `size` elements of each tensor, from first to last."""
        # Not asdict or astuple, which copy tensors.
        tensors = (self.weight, self.gradient, self.master, self.exp_avg, self.exp_avg_sq)
        return map(Operands, *(tensor.split(size) for tensor in tensors))


class UpdateKernel(Protocol):
    """A kernel: one update of `operands` in place, on the calling thread.

    `step` is a float32 scalar on their device that counts this update, the first being 1. The gradient counts `scale`
    times.
    """

    name: str

    def __call__(
        self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0
    ) -> None: ...


class FusedUpdate:
    """torch's fused kernel, tile by tile, with scratch of a tile for each operand that is not float32.

    `threads` are the cores that it may use on the host; None leaves the number to torch.
    """

    name = "fused"

    def __init__(self, threads: int | None = None):
        self._threads = threads

    @torch.no_grad()
    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        on_host = operands.weight.device.type == "cpu"
        tile = HOST_TILE if on_host else DEVICE_TILE
        scratch = _Scratch(min(tile, operands.weight.numel()), operands.weight.device)
        with torch_threads(self._threads if on_host else None):
            for piece in operands.split(tile):
                _update_tile(piece, scratch, step, hyperparameters, scale)


class NativeUpdate:
    """The C loop of adamw_kernel.c on `threads` cores, called without Python's lock.

    Operands that it does not support (a device's tensors, float16) go to the fused kernel.
    """

    name = "native"

    def __init__(self, library: ctypes.CDLL, threads: int):
        self._library = library
        self._threads = threads
        self._other = FusedUpdate(threads)

    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        function = self._function_for(operands)
        if function is None:
            self._other(operands, step, hyperparameters, scale)
            return
        lr, beta1, beta2, eps, weight_decay = hyperparameters
        count = step.item()
        function(
            operands.weight.numel(),
            self._threads,
            operands.weight.data_ptr(),
            operands.gradient.data_ptr(),
            operands.master.data_ptr(),
            operands.exp_avg.data_ptr(),
            operands.exp_avg_sq.data_ptr(),
            scale,
            1 - lr * weight_decay,
            1 - beta1,
            beta2,
            1 - beta2,
            math.sqrt(1 - beta2**count),
            eps,
            lr / (1 - beta1**count),
        )

    def _function_for(self, operands: Operands) -> ctypes._CFuncPtr | None:
        if operands.weight.device.type != "cpu":
            return None
        kinds = (operands.weight.dtype, operands.gradient.dtype, operands.exp_avg.dtype)
        function = getattr(self._library, "adamw_" + "_".join(str(kind).removeprefix("torch.") for kind in kinds), None)
        if function is not None and function.argtypes is None:
            tensors, scalars = [ctypes.c_void_p] * 5, [ctypes.c_float] * 8
            function.argtypes = [ctypes.c_int64, ctypes.c_int, *tensors, *scalars]
            function.restype = None
        return function


@functools.cache
def fastest_update(threads: int, compile: str = "auto") -> UpdateKernel:
    """Returns the faster of the two kernels on `threads` cores of this host, measured once a process.

    `compile`: "auto" compiles the C loop, in about a second, and measures; where there is no compiler, or it fails,
    the fused kernel is taken. "off" takes that at once. Both kernels round alike, but for the last elements of a
    tensor whose length is no multiple of the processor's vectors.
    """
    fused = FusedUpdate(threads)
    library = native_library() if compile == "auto" else None
    if library is None:
        return fused
    candidates = [NativeUpdate(library, threads), fused]
    seconds = measure(candidates)
    rates = ", ".join(f"{kernel.name} {SAMPLE / seconds[kernel.name] / 1e9:.2f}" for kernel in candidates)
    logger.debug("AdamW on %d threads, G parameters/s: %s", threads, rates)
    return min(candidates, key=lambda kernel: seconds[kernel.name])


def measure(kernels: list[UpdateKernel], repeats: int = 3) -> dict[str, float]:
    """Returns seconds by kernel name for an update of SAMPLE bf16 weights with float32 states, the best of several.

    It needs 16 bytes a weight while it runs.
    """
    halves = [torch.zeros(SAMPLE, dtype=torch.bfloat16) for _ in range(2)]
    operands = Operands(*halves, *(torch.zeros(SAMPLE) for _ in range(3)))
    hyperparameters = HyperParameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    found = {kernel.name: math.inf for kernel in kernels}
    for _ in range(repeats):
        for kernel in kernels:
            start = perf_counter()
            kernel(operands, torch.ones(()), hyperparameters)
            found[kernel.name] = min(found[kernel.name], perf_counter() - start)
    return found


def measure_update_rate(threads: int) -> float:
    """Returns how many parameters a second the fastest kernel updates on `threads` cores of this host."""
    (seconds,) = measure([fastest_update(threads)]).values()
    return SAMPLE / seconds


@functools.cache
def native_library() -> ctypes.CDLL | None:
    """Compiles adamw_kernel.c for this processor and loads it, once a process; returns None where that fails.

    The compiler is $CC, else the first of cc, gcc and clang. Nothing is left on disk.
    """
    source = Path(__file__).with_name("adamw_kernel.c")
    names = [os.environ.get("CC"), "cc", "gcc", "clang"]
    compiler = next((path for name in names if name and (path := shutil.which(name))), None)
    if compiler is None:
        logger.info("no C compiler found: AdamW takes torch's fused kernel, about half as fast")
        return None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        target = Path(folder) / "adamw_kernel.so"
        try:
            command = [compiler, *FLAGS, "-o", str(target), str(source), "-lm"]
            subprocess.run(command, capture_output=True, check=True, timeout=60)
            return ctypes.CDLL(str(target))
        except (OSError, subprocess.SubprocessError) as error:
            logger.info("%s cannot make adamw_kernel.c: AdamW takes torch's fused kernel, about half as fast", compiler)
            logger.debug("the compiler's error: %s", getattr(error, "stderr", None) or error)
            return None


@contextmanager
def torch_threads(count: int | None) -> Iterator[None]:
    """Runs torch's operations of the calling thread on `count` threads in the block; None changes nothing.

    Each thread that calls torch has such a number. Threads that have called it before keep theirs; one that first calls
    it while the block is open would start with `count`.
    """
    before = torch.get_num_threads()
    if count is None or count == before:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Scratch:
    """float32 tiles, one for each operand, made at its first use."""

    def __init__(self, size: int, device: torch.device):
        self._size = size
        self._device = device
        self._tiles: dict[str, Tensor] = {}

    def float32(self, tensor: Tensor, name: str) -> Tensor:
        """Returns the values of `tensor` in float32, in memory that may be overwritten."""
        if name not in self._tiles:
            self._tiles[name] = torch.empty(self._size, dtype=torch.float32, device=self._device)
        return self._tiles[name][: tensor.numel()].copy_(tensor)


def _update_tile(
    piece: Operands, scratch: _Scratch, step: Tensor, hyperparameters: HyperParameters, scale: float
) -> None:
    gradient, moments = piece.gradient, [piece.exp_avg, piece.exp_avg_sq]
    if gradient.dtype != torch.float32 or scale != 1:
        gradient = scratch.float32(gradient, "gradient")
    if scale != 1:
        gradient.mul_(scale)
    rounds = piece.exp_avg.dtype != torch.float32
    if rounds:
        moments = [scratch.float32(piece.exp_avg, "exp_avg"), scratch.float32(piece.exp_avg_sq, "exp_avg_sq")]
    # The kernel under torch.optim.AdamW(fused=True), whose wrappers would count a step for each tile.
    fused_adamw_(
        [piece.master],
        [gradient],
        [moments[0]],
        [moments[1]],
        [],
        [step],
        **hyperparameters._asdict(),
        amsgrad=False,
        maximize=False,
    )
    if rounds:
        piece.exp_avg.copy_(moments[0])
        piece.exp_avg_sq.copy_(moments[1])
    if not piece.in_place:
        piece.weight.copy_(piece.master)
