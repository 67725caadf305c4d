"""Device memory that was copied out and is kept for as long as there is room: it may be wanted back soon."""

from __future__ import annotations

from collections import deque

from offload.departures import Departing, Departures


class Lingering:
    """Stands before a queue of departures: the newest stay, without compute waiting for their copies."""

    def __init__(self, departures: Departures):
        self.nbytes = 0
        self._departures = departures
        self._queue: deque[Departing] = deque()

    def add(self, departing: Departing) -> None:
        self._queue.append(departing)
        self.nbytes += departing.tensor.nbytes

    def fit_into(self, nbytes: int) -> None:
        """Sends the oldest on until at most `nbytes` are left."""
        while self.nbytes > nbytes:
            oldest = self._queue.popleft()
            self.nbytes -= oldest.tensor.nbytes
            self._departures.add(oldest)

    def let_go(self) -> None:
        """Hands all of it back, for use behind the copies."""
        self.fit_into(0)
        self._departures.let_go()
