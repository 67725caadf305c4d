"""Chooses the kernels of updates: on the host the C loop, on a GPU that of Triton, torch's where these cannot be used.

The Triton kernel is taken only where it has given the bits of the host's kernel on numbers that are hard to round.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
from time import perf_counter
from typing import NamedTuple

import torch
from torch import Tensor

from offload.optimizer.formats import StateFormat, scales_for
from offload.optimizer.kernels import BlockwiseUpdate, FusedUpdate, HyperParameters, Operands, UpdateKernel
from offload.optimizer.native_kernel import NativeUpdate, native_library

# Elements on which a kernel is measured: more than caches hold, and some milliseconds of work.
SAMPLE = 1 << 24
# Whole vectors of any processor, as torch's kernel of the host rounds a shorter rest in another way; no whole blocks of
# a GPU's kernel.
COUNT = (1 << 14) - 64
SPECIAL = [0.0, -0.0, 1e-45, -1e-45, 1e-39, 1.0, -1.0, 1 + 2**-8, 3.4e38, -3.4e38, float("inf"), float("nan")]
# Where float32 is a tie between two numbers of bfloat16, and next to that.
LOW_HALVES = [0x7FFF, 0x8000, 0x8001, 0]
# Settings, scale of the gradient, step. Without decay, and with a first moment that is the gradient, ties stay ties.
CASES = [
    (HyperParameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1), 0.37, 3.0),
    (HyperParameters(lr=3e-2, beta1=0.0, beta2=0.95, eps=1e-6, weight_decay=0.0), 1.0, 10_000.0),
    (HyperParameters(lr=0.0, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1), 1.0, 1.0),
]

logger = logging.getLogger(__name__)


def update_on(device: torch.device, threads: int, format: StateFormat = StateFormat()) -> UpdateKernel:  # noqa: B008
    """Returns the kernel that updates states on `device`, on `threads` cores where that is the host."""
    return _on_host(threads, format) if device.type == "cpu" else _on_device(device, format)


@functools.cache
def _on_host(threads: int, format: StateFormat) -> UpdateKernel:
    library = native_library(format)
    return FusedUpdate(threads) if library is None else NativeUpdate(library, threads)


@functools.cache
def _on_device(device: torch.device, format: StateFormat) -> UpdateKernel:
    if device.type != "cuda" or format.state_dtype == "int8":
        return FusedUpdate()
    try:
        kernel = _triton_update()
    except Exception as error:  # A Triton for another torch raises errors of any class.
        reason = " ".join(str(error).split())
        logger.warning("updates on %s take torch's kernel, which is slower: Triton cannot be used: %s", device, reason)
        return FusedUpdate()
    return CheckedUpdate(kernel, _on_host(1, format), FusedUpdate(), device)


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
    )


def measure_update_rate(threads: int, format: StateFormat = StateFormat()) -> float:  # noqa: B008
    """Returns how many bf16 parameters a second the kernel updates on `threads` cores of this host, the best of three.

    It needs at most 16 bytes a parameter of SAMPLE while it runs.
    """
    kernel, operands = update_on(torch.device("cpu"), threads, format), sample(format, SAMPLE)
    hyperparameters = HyperParameters(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1)
    seconds = []
    for _ in range(3):
        start = perf_counter()
        kernel(operands, torch.ones(()), hyperparameters)
        seconds.append(perf_counter() - start)
    return SAMPLE / min(seconds)


class Kind(NamedTuple):
    """The dtypes of operands without scales."""

    weight: torch.dtype
    gradient: torch.dtype
    moment: torch.dtype
    master: torch.dtype | None

    @classmethod
    def of(cls, operands: Operands) -> Kind:
        master = None if operands.master is None else operands.master.dtype
        return cls(operands.weight.dtype, operands.gradient.dtype, operands.exp_avg.dtype, master)


class CheckedUpdate:
    """`fast` for each kind of operands for which a check on `device` finds the bits of `reference`, else `other`.

    The check is made at the first use of a kind, and blocks the host for milliseconds. An error in it is a failed
    check.
    """

    def __init__(self, fast: BlockwiseUpdate, reference: UpdateKernel, other: UpdateKernel, device: torch.device):
        self.name = fast.name
        self._fast, self._reference, self._other, self._device = fast, reference, other, device
        self._fits: dict[Kind, bool] = {}

    def __call__(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, scale: float = 1.0) -> None:
        kernel = self.blockwise(operands, hyperparameters) or self._other
        kernel(operands, step, hyperparameters, scale)

    def blockwise(self, operands: Operands, hyperparameters: HyperParameters) -> BlockwiseUpdate | None:
        """Returns `fast` if it updates such operands, else None."""
        fits = self._fast.supports(operands, hyperparameters) and self._is_exact(Kind.of(operands))
        return self._fast if fits else None

    def _is_exact(self, kind: Kind) -> bool:
        if kind not in self._fits:
            try:
                # Whatever the caller's default device is.
                with torch.device("cpu"):
                    reason = difference(self._fast, self._reference, kind, self._device)
            except Exception as error:  # Compilers and drivers raise errors of any class.
                reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            if reason is not None:
                names = ", ".join(str(each).removeprefix("torch.") for each in kind)
                logger.warning(
                    "updates of %s on %s take the %s kernel, which is slower: the %s kernel fails its check: %s",
                    *(names, self._device, self._other.name, self._fast.name, reason),
                )
            self._fits[kind] = reason is None
        return self._fits[kind]


def difference(kernel: UpdateKernel, reference: UpdateKernel, kind: Kind, device: torch.device) -> str | None:
    """Returns what `kernel` on `device` computes differently from `reference` on the host; None for nothing.

    NaN are equal, whatever their payloads.
    """
    for settings, scale, step in CASES:
        expected = hard_operands(kind)
        copies = [copied_to(expected, device, shift) for shift in (0, 1)]
        reference(expected, torch.tensor(step), settings, scale)
        for found in copies:
            kernel(found, torch.tensor(step, device=device), settings, scale)
            for name in ("weight", "master", "exp_avg", "exp_avg_sq"):
                one, other = getattr(found, name), getattr(expected, name)
                if one is not None and (count := count_different(one.cpu(), other)):
                    return f"{count} of {COUNT} numbers of {name} differ from those of the {reference.name} kernel"
    return None


def count_different(one: Tensor, other: Tensor) -> int:
    """Returns how many numbers of two host tensors of one dtype differ in their bits; all NaN are alike."""
    bits = torch.int32 if one.dtype.itemsize == 4 else torch.int16
    differ = one.view(bits) != other.view(bits)
    return int((differ & ~(one.isnan() & other.isnan())).sum())


def copied_to(operands: Operands, device: torch.device, shift: int) -> Operands:
    """Returns a copy of the operands on `device`, each `shift` elements behind an aligned address."""

    def copied(tensor: Tensor) -> Tensor:
        return torch.empty(len(tensor) + shift, dtype=tensor.dtype, device=device)[shift:].copy_(tensor)

    fields = {field.name: getattr(operands, field.name) for field in dataclasses.fields(operands)}
    return Operands(**{name: copied(each) if isinstance(each, Tensor) else each for name, each in fields.items()})


def hard_operands(kind: Kind) -> Operands:
    """Returns COUNT elements on the host: all bit patterns, ties, ordinary numbers, and special ones in all pairs.

    They are the same at each call. The noise's counter of 32 bits ends within them.
    """
    draw = torch.Generator().manual_seed(0)
    part = COUNT // 4
    weight, gradient = _numbers(kind.weight, 1.0, draw), _numbers(kind.gradient, 1e-3, draw)
    exp_avg, exp_avg_sq = _numbers(kind.moment, 1e-3, draw), _numbers(kind.moment, 1e-6, draw)
    exp_avg_sq[: COUNT - part // 2].abs_()
    # A weight beside these stays as it is, where it does not decay.
    for tensor in (gradient, exp_avg, exp_avg_sq):
        tensor[part : part + part // 2] = 0
    return Operands(
        weight=weight,
        gradient=gradient,
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        master=None if kind.master is None else _numbers(kind.master, 1.0, draw),
        start=(1 << 32) - COUNT // 2,
        seed=-77,
    )


def _numbers(dtype: torch.dtype, size: float, draw: torch.Generator) -> Tensor:
    """Returns quarters of random bits, of those with a hard low half, of ordinary and of special numbers."""
    part = COUNT // 4
    bits = torch.randint(-(1 << 31), 1 << 31, (COUNT,), generator=draw).to(torch.int32)
    choices = torch.randint(0, 1 << 30, (COUNT,), generator=draw)
    hard = slice(part, 2 * part)
    bits[hard] = bits[hard] & ~0xFFFF | torch.tensor(LOW_HALVES, dtype=torch.int32)[choices[hard] % len(LOW_HALVES)]
    if dtype == torch.int16:
        return bits.view(torch.int16)[::2].clone()
    values = bits.view(torch.float32).clone() if dtype == torch.float32 else bits.view(torch.int16)[1::2].view(dtype)
    values = values.clone()
    values[2 * part : 3 * part] = torch.randn(part, generator=draw) * size
    values[3 * part :] = torch.tensor(SPECIAL)[choices[3 * part :] % len(SPECIAL)]
    return values
