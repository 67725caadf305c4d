"""Chooses the kernels of updates.

That of the host is the faster of torch's and the C loop, measured once a process; that of a GPU is the Triton kernel,
where a check finds that its numbers are the host's, else torch's.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Sequence
from time import perf_counter

import torch

from offload.optimizer.block_quantise import scales_for
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernel_check import CheckedUpdate
from offload.optimizer.kernels import BlockwiseUpdate, FusedUpdate, UpdateKernel
from offload.optimizer.native_kernel import NativeUpdate, native_library
from offload.optimizer.operands import HyperParameters, Operands

# Elements on which a kernel is measured: more than caches hold, and some milliseconds of work.
SAMPLE = 1 << 24

logger = logging.getLogger(__name__)


@functools.cache
def fastest_update(threads: int, compile: str = "auto", format: StateFormat = StateFormat()) -> UpdateKernel:  # noqa: B008
    """Returns the faster of the two kernels on `threads` cores of this host, measured once a process.

    The C loop is compiled for `format`, in about a second, and measured; where there is no compiler, or it fails, the
    fused kernel is taken. `compile="off"` takes that at once. Both kernels round alike.
    """
    fused = FusedUpdate(threads)
    library = native_library(format) if compile != "off" else None
    if library is None:
        return fused
    candidates = [NativeUpdate(library, threads), fused]
    seconds = measure(candidates, format)
    rates = ", ".join(f"{kernel.name} {SAMPLE / seconds[kernel.name] / 1e9:.2f}" for kernel in candidates)
    logger.debug("AdamW of %s on %d threads, G parameters/s: %s", format, threads, rates)
    return min(candidates, key=lambda kernel: seconds[kernel.name])


def update_on(
    device: torch.device,
    threads: int,
    compile: str = "auto",
    format: StateFormat = StateFormat(),  # noqa: B008
) -> UpdateKernel:
    """Returns the kernel that updates states on `device`: on the host `fastest_update`.

    On a GPU the Triton kernel updates what it supports, if it has the numbers of the host's kernel (`CheckedUpdate`).
    Else, and under `compile="off"`, torch's kernel does.
    """
    if device.type == "cpu":
        return fastest_update(threads, compile, format)
    if device.type != "cuda" or compile == "off" or format.state_dtype == "int8":
        return FusedUpdate()
    return _checked_update(device, format)


@functools.cache
def _checked_update(device: torch.device, format: StateFormat) -> UpdateKernel:
    fused = FusedUpdate()
    try:
        kernel = _triton_update()
    except Exception as error:  # A Triton for another torch raises errors of any class.
        reason = " ".join(str(error).split())
        logger.warning("updates on %s take torch's kernel, which is slower: Triton cannot be used: %s", device, reason)
        return fused
    library = native_library(format)
    reference = FusedUpdate(threads=1) if library is None else NativeUpdate(library, threads=1)
    return CheckedUpdate(kernel, reference, fused, device)


def _triton_update() -> BlockwiseUpdate:
    # Torch's builds for the CPU have no Triton.
    from offload.optimizer.triton_kernel import TritonUpdate

    return TritonUpdate()


def sample(format: StateFormat, count: int) -> Operands:
    """Returns operands of zeros: `count` bfloat16 weights and gradients with states of `format`."""

    def zeros(dtype: torch.dtype | None, size: int = count) -> torch.Tensor | None:
        return None if dtype is None else torch.zeros(size, dtype=dtype)

    scale = torch.float32 if format.state_dtype == "int8" else None
    return Operands(
        weight=zeros(torch.bfloat16),
        gradient=zeros(torch.bfloat16),
        exp_avg=zeros(format.moment_dtype),
        exp_avg_sq=zeros(format.moment_dtype),
        master=zeros(format.master_dtype(torch.bfloat16)),
        exp_avg_scale=zeros(scale, scales_for(count)),
        exp_avg_sq_scale=zeros(scale, scales_for(count)),
        rounds_moments=format.rounds_moments,
    )


def measure(kernels: Sequence[UpdateKernel], format: StateFormat, repeats: int = 3) -> dict[str, float]:
    """Returns seconds by kernel name for an update of SAMPLE bf16 weights with states of `format`, the best of several.

    It needs at most 16 bytes a weight while it runs.
    """
    operands = sample(format, SAMPLE)
    hyperparameters = HyperParameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    found = {kernel.name: math.inf for kernel in kernels}
    for _ in range(repeats):
        for kernel in kernels:
            start = perf_counter()
            kernel(operands, torch.ones(()), hyperparameters)
            found[kernel.name] = min(found[kernel.name], perf_counter() - start)
    return found


def measure_update_rate(threads: int, format: StateFormat = StateFormat()) -> float:  # noqa: B008
    """Returns how many parameters a second the fastest kernel updates on `threads` cores of this host."""
    (seconds,) = measure([fastest_update(threads, format=format)], format).values()
    return SAMPLE / seconds
