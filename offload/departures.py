"""Device memory on its way out: kept until the copies that use it are done, without stopping the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from offload.registry import Event, Stream
from offload.transfer import Transfer


@dataclass(eq=False)
class Departing:
    """Device memory that a side stream still uses; it may go once `done` is past on `owner`, which computed it."""

    tensor: torch.Tensor
    done: Event
    name: str
    owner: Stream

    def __str__(self) -> str:
        return self.name


class Departures:
    """A queue of departing device memory of at most `limit_bytes`, beyond which compute waits for the oldest.

    The allocator hands memory out again in the order of the stream that it was for, as soon as the host drops it. So
    that stream is put behind the copy first; doing that late, for what was queued long ago, makes the wait short.
    """

    def __init__(self, transfer: Transfer, limit_bytes: int):
        self._transfer = transfer
        self._limit_bytes = limit_bytes
        self._queue: deque[Departing] = deque()
        self._bytes = 0

    def add(self, departing: Departing) -> None:
        self._queue.append(departing)
        self._bytes += departing.tensor.nbytes
        while len(self._queue) > 1 and self._bytes > self._limit_bytes:
            self._let_oldest_go()

    def let_go(self) -> None:
        """Hands all of it back, for use behind the copies."""
        while self._queue:
            self._let_oldest_go()

    def _let_oldest_go(self) -> None:
        oldest = self._queue.popleft()
        self._bytes -= oldest.tensor.nbytes
        self._transfer.await_on(oldest.owner, oldest.done)
        self._transfer.streams.writes(oldest.owner, oldest, "reuse")
