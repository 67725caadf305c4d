"""Updates with a log, and operands of any bits, for the tests of undoing."""

import dataclasses

import torch

from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import HyperParameters, Operands, UpdateKernel
from offload.optimizer.native_kernel import NativeUpdate, native_library
from offload.speculation.undo_log import Outcome, ReversibleUpdate, UndoLog, undo_library
from tests.offload.helpers.kernels import SETTINGS

FORMATS = [StateFormat(state_dtype=moments) for moments in ("fp32", "bf16")]


def kernels(format: StateFormat) -> tuple[UpdateKernel, ReversibleUpdate]:
    """An ordinary kernel, and the one with a log that belongs to it."""
    return NativeUpdate(native_library(format), 2), ReversibleUpdate(undo_library(format), 2)


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
