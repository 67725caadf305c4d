"""Device memory that a copy still uses: it is freed later, without stopping the host.

torch's allocator gives memory out again as soon as the host drops the last reference to it, in the order of the stream
that it was allocated on. A copy on another stream may not be done by then. So the memory stays referenced, as a
`PendingFree`, until the stream that it was allocated on has been made to wait for the copy. The later that is done, the
shorter the stream waits.

`DeferredFrees` bounds the memory that is pending. `StashedTensors` stands before it: tensors that may be wanted again
soon stay there as long as there is room, and compute does not wait for their copies.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import torch

from offload.streams.registry import Event, Stream
from offload.streams.transfer import Transfer


@dataclass(eq=False)
class PendingFree:
    """Device memory that a side stream still uses. It may be freed once `owner`, which allocated it, waited for `done`.

    `name` names it in messages of the stream checker.
    """

    tensor: torch.Tensor
    done: Event
    name: str
    owner: Stream

    def __str__(self) -> str:
        return self.name


class DeferredFrees:
    """A queue of pending memory of at most `limit_bytes`; beyond that, the compute stream waits for the oldest copy.

    The newest entry stays in any case, also if it is larger than the limit.
    """

    def __init__(self, transfer: Transfer, limit_bytes: int):
        self._transfer = transfer
        self._limit_bytes = limit_bytes
        self._queue: deque[tuple[int, tuple[PendingFree, ...]]] = deque()
        self._bytes = 0

    def add(self, *pending: PendingFree) -> None:
        """Takes over the last references to some memory, all with the same `owner` and `done`, which is recorded."""
        nbytes = sum([each.tensor.nbytes for each in pending])
        self._queue.append((nbytes, pending))
        self._bytes += nbytes
        while len(self._queue) > 1 and self._bytes > self._limit_bytes:
            self._release_oldest()

    def release(self) -> None:
        """Frees all memory, for use after the copies."""
        while self._queue:
            self._release_oldest()

    def _release_oldest(self) -> None:
        nbytes, oldest = self._queue.popleft()
        self._bytes -= nbytes
        owner = oldest[0].owner
        self._transfer.await_on(owner, oldest[0].done)
        for pending in oldest:
            self._transfer.streams.writes(owner, pending, "reuse")


class StashedTensors:
    """Pending memory that is kept while there is room, the newest longest. `nbytes` is how much that is."""

    def __init__(self, deferred_frees: DeferredFrees):
        self.nbytes = 0
        self._deferred_frees = deferred_frees
        self._queue: deque[PendingFree] = deque()

    def add(self, pending: PendingFree) -> None:
        """Takes over the last reference to some memory."""
        self._queue.append(pending)
        self.nbytes += pending.tensor.nbytes

    def fit_into(self, nbytes: int) -> None:
        """Passes the oldest memory on to the deferred frees until at most `nbytes` are left here."""
        while self.nbytes > nbytes:
            oldest = self._queue.popleft()
            self.nbytes -= oldest.tensor.nbytes
            self._deferred_frees.add(oldest)

    def release(self) -> None:
        """Frees all memory, that of the deferred frees too, for use after the copies."""
        self.fit_into(0)
        self._deferred_frees.release()
