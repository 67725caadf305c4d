"""Exchanges a few numbers between processes of one host, through memory that they share.

Each process writes its numbers to a row of its own and reads those of the others. That takes microseconds, where
messages over sockets take a tenth of a millisecond or more. A row has the number of its exchange and a checksum. So a
row that is being written, or whose words arrive in another order, reads as one that is not there yet, on any processor.

A row is written again two exchanges later (each process has two). By then all have read it, because each
process reads all rows of an exchange before it begins the next.
"""

from __future__ import annotations

import time
import zlib
from array import array
from collections.abc import Sequence
from functools import partial

from offload.sharing.processes import Processes
from offload.sharing.shared_memory import share_memory
from offload.sharing.sharers import Sharers

WORD_BYTES = 8
# The number of the exchange, how many numbers there are, the numbers, the checksum. Two cache lines of most processors.
ROW_WORDS = 16
MOST_NUMBERS = ROW_WORDS - 3


class ExchangeBoard:
    """The rows of all `sharers` of a host; every sharer makes one at the same time, and waits for the others.

    Raises SharerLostError, as `Sharers.exchange` does, if one of them does not come.
    """

    def __init__(self, sharers: Sharers):
        self._rank, self._count = sharers.rank, sharers.count
        nbytes = 2 * self._count * ROW_WORDS * WORD_BYTES
        self._words = share_memory(sharers, nbytes).take(nbytes).cast("q")
        self._processes = Processes(sharers)
        self._exchange = 0

    def exchange(self, numbers: Sequence[int], limit_s: float) -> list[list[int]]:
        """Blocks the host until every sharer has written its numbers; returns those of each, in the order of ranks.

        The numbers are signed, of 64 bits. Raises ValueError for more than MOST_NUMBERS, and SharerLostError for a
        sharer whose process has ended, or that does not come within `limit_s` seconds.
        """
        if len(numbers) > MOST_NUMBERS:
            raise ValueError(f"{len(numbers)} numbers are more than a row of the exchange board has: {MOST_NUMBERS}")
        self._exchange += 1
        row = array("q", (self._exchange, len(numbers), *numbers))
        row.append(zlib.crc32(row))
        start = self._row(self._rank)
        self._words[start : start + len(row)] = row
        began, awaited = time.monotonic(), self._processes.awaited
        return [
            list(numbers) if rank == self._rank else awaited(rank, partial(self._read, rank), began, limit_s)
            for rank in range(self._count)
        ]

    def _row(self, rank: int) -> int:
        return (2 * rank + self._exchange % 2) * ROW_WORDS

    def _read(self, rank: int) -> list[int] | None:
        """Returns the numbers of a rank in this exchange; None if they are not there."""
        start = self._row(rank)
        if self._words[start] != self._exchange:
            return None
        row = array("q", self._words[start : start + ROW_WORDS])
        end = 2 + row[1]
        if not 2 <= end < ROW_WORDS or row[0] != self._exchange or zlib.crc32(row[:end]) != row[end]:
            return None
        return row[2:end].tolist()
