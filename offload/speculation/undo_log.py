"""AdamW updates that can be undone bit for bit, by a log of 3.3 bytes a parameter.

An update can be inverted but for its rounding: `m' = beta1 m + (1 - beta1) g` gives an estimate of m from m' and the
gradient g, and so do the rules of the second moment and of the master. The log holds how far the old number is from its
estimate: the difference of their bits, which nearly always fits into a byte. An element of which a number is farther
away has an entry with the old bits of all its numbers. Rounding errors of an invertible update are kept in the
same way by Maclaurin et al. (2015), "Gradient-based hyperparameter optimization through reversible learning".
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from offload.memory.limits import free_host_bytes
from offload.optimizer.formats import StateFormat
from offload.optimizer.kernels import EACH, HyperParameters, Operands
from offload.optimizer.native_kernel import NativeLibrary, addresses, factors, native_library

# Elements that have a table of entries of their own.
BLOCK = 1 << 16
# A block has an entry for each run of this many elements, and those of a tile of the C loop besides.
ELEMENTS_FOR_ENTRY = 64
TILE = 64
# Place in the block, and bits of weight, of what makes its master, and of the moments.
ENTRY_WORDS = 5
NUMBERS = 3
# The memory of each part begins at a multiple of this.
ALIGNED = 64
SOURCE = Path(__file__).with_name("adamw_undo.c")
COUNTS, FACTORS, INVERSES = [ctypes.c_int64, ctypes.c_int], [ctypes.c_float] * 7, [ctypes.c_float] * 3
TENSORS, LOG = [ctypes.c_void_p] * 5, [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
SQUARES = [ctypes.POINTER(ctypes.c_double)]


def can_be_undone(format: StateFormat) -> bool:
    """Tells whether updates of states of this format can be undone: exact masters, moments of 16 bits or more.

    Codes of 8 bits share a scale, and masters that are rounded at random have lost what an inverse would need.
    """
    return format.master == "compact" and format.state_dtype != "int8"


def log_bytes(parameters: Iterable[Tensor]) -> int:
    """Returns the bytes of the logs of one update of those `parameters` that train; meta ones will do."""
    return bytes_of_logs(parameter.numel() for parameter in parameters if parameter.requires_grad)


def bytes_of_logs(counts: Iterable[int]) -> int:
    """Returns the bytes of logs for ranges of so many elements."""
    return sum(map(UndoLog.nbytes, counts))


@dataclass
class UndoLog:
    """The log of the update of one range of a parameter.

    Args:
        codes: int8 [3, elements]: the bits of the old first moment, second moment and master, read as an integer, less
            those of their estimates. Each row begins with a cache line.
        entries: int32 [entries, 5]: those of the first block, then those of the second, and so on.
        progress: int32 [blocks, 2]: elements that were updated, and entries in use, of each block.
    """

    codes: Tensor
    entries: Tensor
    progress: Tensor

    @classmethod
    def over(cls, memory: Tensor, count: int) -> UndoLog:
        """Returns a log for `count` elements in `memory`, uint8 [nbytes(count)]."""
        sizes = _sizes(count)
        entries, progress, codes = (part[:size] for part, size in zip(memory.split(_padded(sizes)), sizes, strict=True))
        return cls(
            codes.view(torch.int8).view(NUMBERS, -1)[:, :count],
            entries.view(torch.int32).view(-1, ENTRY_WORDS),
            progress.view(torch.int32).view(-1, 2),
        )

    @staticmethod
    def nbytes(count: int) -> int:
        """Returns the bytes of a log for `count` elements."""
        return sum(_padded(_sizes(count)))


def entries_for(count: int) -> int:
    """Returns the number of entries for the first `count` elements."""
    whole, rest = divmod(count, BLOCK)
    return whole * (TILE + BLOCK // ELEMENTS_FOR_ENTRY) + (TILE + rest // ELEMENTS_FOR_ENTRY if rest else 0)


def _sizes(count: int) -> list[int]:
    """Returns the bytes of entries, progress and codes."""
    word = torch.int32.itemsize
    return [entries_for(count) * ENTRY_WORDS * word, -(-count // BLOCK) * 2 * word, NUMBERS * _padded([count])[0]]


def _padded(sizes: list[int]) -> list[int]:
    return [-(-size // ALIGNED) * ALIGNED for size in sizes]


class UndoArena:
    """Host memory of at most `limit` bytes for the logs of one step at a time.

    Reserved with the first log: at most half of what the host has free then, divided among `processes`. The system
    gives pages to what is written alone.
    """

    def __init__(self, limit: int, processes: int = 1):
        self.limit = limit
        self._processes = processes
        self._memory: Tensor | None = None
        self._used = self._taken = 0

    def take(self, counts: Sequence[int]) -> list[UndoLog] | None:
        """Returns logs for ranges of so many elements; None where there is no room left for all of them."""
        sizes = [UndoLog.nbytes(count) for count in counts]
        if self._memory is None:
            free = free_host_bytes()
            size = self.limit if free is None else min(self.limit, free // (2 * self._processes))
            self._memory = torch.empty(size, dtype=torch.uint8)
        begin, end = self._used, self._used + sum(sizes)
        if end > self._memory.numel():
            return None
        self._used, self._taken = end, self._taken + 1
        pieces = self._memory[begin:end].split(sizes)
        return [UndoLog.over(piece, count) for piece, count in zip(pieces, counts, strict=True)]

    def give_back(self) -> None:
        """Takes back what one `take` returned, which nobody uses any more; with the last all memory is free again."""
        self._taken -= 1
        if not self._taken:
            self._used = 0


class Outcome(NamedTuple):
    """The result of an update with a log."""

    squares: float
    """the sum of the squares of the gradients of the elements that were updated"""
    is_complete: bool
    """False: the log had no room for more, and some elements were not updated; undo the others"""


def undo_library(format: StateFormat) -> NativeLibrary | None:
    """Returns the C loop of adamw_undo.c for a format that `can_be_undone`; None without a compiler."""
    return native_library(format, SOURCE, f"-DELEMENTS_FOR_ENTRY={ELEMENTS_FOR_ENTRY}")


class ReversibleUpdate:
    """The rule of adamw_kernel.c with its results, and a log; on `threads` cores, called without Python's lock.

    It takes the operands that `library` supports.
    """

    def __init__(self, library: NativeLibrary, threads: int):
        self._library = library
        self._threads = threads

    def update(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, log: UndoLog) -> Outcome:
        """Updates the operands in place and writes the log. `step`: the count of this update, a float32 scalar."""
        arguments = [*COUNTS, *TENSORS, *LOG, *SQUARES, *FACTORS, *INVERSES]
        function = self._library.function("update", operands, arguments, ctypes.c_int)
        squares = ctypes.c_double()
        is_complete = function(
            *self._operands(operands, log), squares, *factors(hyperparameters, step), *_inverses(hyperparameters)
        )
        return Outcome(squares.value, bool(is_complete))

    def undo(self, operands: Operands, step: Tensor, hyperparameters: HyperParameters, log: UndoLog) -> None:
        """Gives the operands the bits that they had; gradient, `step` and hyper-parameters are those of `update`."""
        arguments = [*COUNTS, *TENSORS, *LOG, *FACTORS[1:], *INVERSES]
        function = self._library.function("undo", operands, arguments)
        # The old master is found by the inverse of the decay alone.
        function(*self._operands(operands, log), *factors(hyperparameters, step)[1:], *_inverses(hyperparameters))

    def _operands(self, of: Operands, log: UndoLog) -> tuple[int | None, ...]:
        parts = log.codes.data_ptr(), log.codes.stride(0), log.entries.data_ptr(), log.progress.data_ptr()
        return of.weight.numel(), self._threads, *addresses(of, *EACH), *parts


def _inverses(hyperparameters: HyperParameters) -> tuple[float, ...]:
    """Returns the inverses of beta1, beta2 and the decay; of 0, NaN, with which each element becomes an entry."""
    lr, beta1, beta2, _, weight_decay = hyperparameters
    return tuple(1 / factor if factor else float("nan") for factor in (beta1, beta2, 1 - lr * weight_decay))
