"""Updates that can be undone as a C loop, adamw_undo.c: one pass over memory, which writes 3 bytes a parameter more.

It has the rule of adamw_kernel.c, and its results.
"""

from __future__ import annotations

import ctypes

from torch import Tensor

from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import UpdateKernel
from offload.optimizer.native_kernel import NativeLibrary, NativeUpdate, address, factors, native_library
from offload.optimizer.operands import HyperParameters, Operands
from offload.optimizer.torch_undo import TorchReversible
from offload.optimizer.undo_log import ELEMENTS_FOR_ENTRY, Outcome, ReversibleUpdate, UndoLog

SOURCE = "adamw_undo.c"
COUNTS, FACTORS, INVERSES = [ctypes.c_int64, ctypes.c_int], [ctypes.c_float] * 7, [ctypes.c_float] * 3
TENSORS, LOG = [ctypes.c_void_p] * 5, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
SQUARES = [ctypes.POINTER(ctypes.c_double)]


class NativeReversible:
    """`ReversibleUpdate` by the C loop on `threads` cores, called without Python's lock.

    Operands that the library does not support go to torch's operations around `NativeUpdate`.
    """

    def __init__(self, library: NativeLibrary, other: UpdateKernel, threads: int):
        self._library = library
        self._threads = threads
        self._other = TorchReversible(other, threads)

    def update(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, log: UndoLog) -> Outcome:
        if not self._library.supports(operands):
            return self._other.update(operands, step, hyperparameters, log)
        arguments = [*COUNTS, *TENSORS, *LOG, *SQUARES, *FACTORS, *INVERSES]
        function = self._library.function("update", operands, arguments, ctypes.c_int)
        squares = ctypes.c_double()
        is_complete = function(
            *self._operands(operands, log), squares, *factors(hyperparameters, step), *_inverses(hyperparameters)
        )
        return Outcome(squares.value, bool(is_complete))

    def undo(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, log: UndoLog) -> None:
        if not self._library.supports(operands):
            self._other.undo(operands, step, hyperparameters, log)
            return
        arguments = [*COUNTS, *TENSORS, *LOG, *FACTORS[1:], *INVERSES]
        function = self._library.function("undo", operands, arguments)
        # The old master is found by the inverse of the decay alone.
        function(*self._operands(operands, log), *factors(hyperparameters, step)[1:], *_inverses(hyperparameters))

    def _operands(self, of: Operands, log: UndoLog) -> tuple[int | None, ...]:
        tensors = (of.weight, of.gradient, of.master, of.exp_avg, of.exp_avg_sq)
        row = log.codes.stride(0)
        parts = address(log.codes), row, address(log.entries), address(log.progress)
        return of.weight.numel(), self._threads, *map(address, tensors), *parts


def reversible(kernel: UpdateKernel, format: StateFormat, threads: int) -> ReversibleUpdate:
    """Returns a kernel whose updates are those of `kernel`, on `threads` cores, and can be undone.

    `format` is one for which `can_be_undone`. The C loop is compiled once a process, for a kernel that is one too.
    """
    library = None
    if isinstance(kernel, NativeUpdate):
        library = native_library(format, SOURCE, (f"-DELEMENTS_FOR_ENTRY={ELEMENTS_FOR_ENTRY}",))
    return TorchReversible(kernel, threads) if library is None else NativeReversible(library, kernel, threads)


def _inverses(hyperparameters: HyperParameters) -> tuple[float, ...]:
    """Returns the inverses of beta1, beta2 and the decay; of 0, NaN, with which each element becomes an entry."""
    lr, beta1, beta2, _, weight_decay = hyperparameters
    return tuple(1 / factor if factor else float("nan") for factor in (beta1, beta2, 1 - lr * weight_decay))
