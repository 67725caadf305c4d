"""Updates with a log, and operands of any bits, for the tests of undoing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import FusedUpdate, UpdateKernel
from offload.optimizer.native_kernel import NativeUpdate, native_library
from offload.optimizer.native_undo import reversible
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.undo_log import MASTERS, MOMENTS, Outcome, ReversibleUpdate, UndoLog
from tests.offload.helpers.kernels import SETTINGS

FORMATS = [StateFormat(master, moments) for master in MASTERS for moments in MOMENTS]


def _torch(format: StateFormat) -> tuple[UpdateKernel, ReversibleUpdate]:
    kernel = FusedUpdate(1)
    return kernel, reversible(kernel, format, 1)


def _native(format: StateFormat) -> tuple[UpdateKernel, ReversibleUpdate]:
    library = native_library(format)
    if library is None:
        pytest.skip("needs a C compiler with OpenMP")
    kernel = NativeUpdate(library, 2)
    return kernel, reversible(kernel, format, 2)


# An ordinary kernel, and the one with a log that belongs to it.
KERNELS: dict[str, Callable[[StateFormat], tuple[UpdateKernel, ReversibleUpdate]]] = {
    "torch": _torch,
    "native": _native,
}


def log_for(count: int) -> UndoLog:
    """A log in memory that was used before."""
    return UndoLog.over(torch.full((UndoLog.nbytes(count),), 77, dtype=torch.uint8), count)


def with_log(
    kernel: ReversibleUpdate, on: Operands, step: torch.Tensor, hyperparameters: HyperParameters = SETTINGS
) -> tuple[Outcome, UndoLog]:
    log = log_for(on.weight.numel())
    return kernel.update(on, step, hyperparameters, log), log


def of_bits(words: torch.Tensor, format: StateFormat, weight: torch.dtype) -> Operands:
    """Operands whose numbers have these bits, int64 [elements, 5]: those of weight, its rest, gradient and moments."""
    columns = words.T
    master = format.master_dtype(weight)
    dtypes = (weight, master or weight, weight, format.moment_dtype, format.moment_dtype)
    made = []
    for column, dtype in zip(columns, dtypes, strict=True):
        bits = column if dtype.itemsize == 4 else column >> 16
        made.append(bits.to(torch.int32 if dtype.itemsize == 4 else torch.int16).view(dtype))
    weights, rest, gradient, exp_avg, exp_avg_sq = made
    return Operands(weights, gradient, exp_avg, exp_avg_sq, None if master is None else rest)


def copy_of(of: Operands) -> Operands:
    tensors = ("weight", "gradient", "exp_avg", "exp_avg_sq", "master")
    return dataclasses.replace(of, **{name: t.clone() for name in tensors if (t := getattr(of, name)) is not None})


def without_payloads(of: Operands) -> Operands:
    """A copy in which every NaN is the same."""
    made = copy_of(of)
    for tensor in (made.weight, made.exp_avg, made.exp_avg_sq):
        tensor[tensor.isnan()] = float("nan")
    if made.master is not None and made.master.is_floating_point():
        made.master[made.master.isnan()] = float("nan")
    return made


def assert_same_bits(one: Operands, other: Operands) -> None:
    for name in ("weight", "exp_avg", "exp_avg_sq", "master"):
        first, second = getattr(one, name), getattr(other, name)
        if first is not None:
            assert torch.equal(bits_of(first), bits_of(second)), name


def bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.itemsize == 4 else torch.int16)
