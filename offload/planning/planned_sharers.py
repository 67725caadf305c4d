"""Stands for the processes that share homes in a dry run: all do what this one does, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.planning.simulated_streams import SimulatedStreams


class PlannedSharers:
    """The `Sharers` of the first of `count` processes on each of `hosts`, all of which do the same.

    `exchanged_bytes` are those that one device has received from the others of its host, in all steps. `streams` let
    the time pass that this takes; None: nobody asks for it. Exchanges between hosts are not counted.
    """

    rank = first = 0

    limit_s = float("inf")

    def __init__(self, count: int, hosts: int = 1, streams: SimulatedStreams | None = None):
        self.count = count
        self.hosts = hosts
        self.exchanged_bytes = 0.0
        self._streams = streams

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        return [list(numbers)] * (self.count * self.hosts if everywhere else self.count)

    def attempt(self, call: Callable[[], None], what: str) -> None:
        call()

    def gather(self, whole: torch.Tensor, what: str) -> None:
        self._receive(whole.nbytes)

    def sum(self, flat: torch.Tensor, what: str) -> None:
        # The others' slices before they are added; over several hosts all that come from one.
        flat.new_empty(flat.numel() if self.hosts > 1 else flat.numel() // self.count * (self.count - 1))
        # Slices, and then their sums.
        self._receive(2 * flat.nbytes)

    def _receive(self, nbytes: int) -> None:
        others = nbytes * (self.count - 1) / self.count
        self.exchanged_bytes += others
        if self._streams is not None:
            self._streams.exchange(others)
