"""Stands for the processes that share homes in a dry run: all do what this one does, at the same time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from offload.planning.simulated_streams import SimulatedStreams
from offload.sharing.sharers import CopyWay, LinkWay


class PlannedSharers:
    """The `Sharers` of the first of `count` processes on each of `hosts`, all of which do the same.

    `exchanged_bytes` are those that one device has received from the others of its host, in all steps. `streams` let
    the time pass that this takes; None: nobody asks for it. Exchanges between hosts are not counted.
    """

    rank = first = 0

    def __init__(
        self,
        count: int,
        hosts: int = 1,
        streams: SimulatedStreams | None = None,
        copies: CopyWay = "slices",
        links: LinkWay = "collectives",
    ):
        self.count = count
        self.hosts = hosts
        # Nothing could be timed in a dry run.
        self.copies = "slices" if copies == "auto" else copies
        self.links, self.limit_s = links, float("inf")
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

    def sum(self, flat: torch.Tensor, what: str, in_slices: bool = False) -> None:
        if self.links == "copies" and self.hosts == 1:
            # The others' slices before they are added.
            flat.new_empty(flat.numel() // self.count * (self.count - 1))
        elif self.count * self.hosts > 2:
            # The slices that come from all of a host before they are added. Those of two processes are added in place.
            torch.empty_like(flat)
        # Slices, and then their sums.
        self._receive(flat.nbytes if in_slices else 2 * flat.nbytes)

    def _receive(self, nbytes: int) -> None:
        others = nbytes * (self.count - 1) / self.count
        self.exchanged_bytes += others
        if self._streams is not None:
            self._streams.exchange(others)
