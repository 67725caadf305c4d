"""Device memory that a copy still uses: freed later, without stopping the host."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from offload.runtime.registry import Event, Stream
from offload.runtime.transfer import Transfer


@dataclass(eq=False)
class PendingFree:
    """Device memory that a side stream still uses; it may go once `done` is past on `owner`, which computed it."""

    tensor: torch.Tensor
    done: Event
    name: str
    owner: Stream

    def __str__(self) -> str:
        return self.name


class DeferredFrees:
    """A queue of departing device memory of at most `limit_bytes`, beyond which compute waits for the oldest.

    The allocator hands memory out again in the order of the stream that it was for, as soon as the host drops it. So
    that stream is put behind the copy first; doing that late, for what was queued long ago, makes the wait short.
    """

    def __init__(self, transfer: Transfer, limit_bytes: int):
        self._transfer = transfer
        self._limit_bytes = limit_bytes
        self._queue: deque[PendingFree] = deque()
        self._bytes = 0

    def add(self, departing: PendingFree) -> None:
        self._queue.append(departing)
        self._bytes += departing.tensor.nbytes
        while len(self._queue) > 1 and self._bytes > self._limit_bytes:
            self._release_oldest()

    def release(self) -> None:
        """Hands all of it back, for use behind the copies."""
        while self._queue:
            self._release_oldest()

    def _release_oldest(self) -> None:
        oldest = self._queue.popleft()
        self._bytes -= oldest.tensor.nbytes
        self._transfer.await_on(oldest.owner, oldest.done)
        self._transfer.streams.writes(oldest.owner, oldest, "reuse")


class StashedTensors:
    """Stands before a queue of departures: the newest stay, without compute waiting for their copies."""

    def __init__(self, departures: DeferredFrees):
        self.nbytes = 0
        self._deferred_frees = departures
        self._queue: deque[PendingFree] = deque()

    def add(self, departing: PendingFree) -> None:
        self._queue.append(departing)
        self.nbytes += departing.tensor.nbytes

    def fit_into(self, nbytes: int) -> None:
        """Sends the oldest on until at most `nbytes` are left."""
        while self.nbytes > nbytes:
            oldest = self._queue.popleft()
            self.nbytes -= oldest.tensor.nbytes
            self._deferred_frees.add(oldest)

    def release(self) -> None:
        """Hands all of it back, for use behind the copies."""
        self.fit_into(0)
        self._deferred_frees.release()
