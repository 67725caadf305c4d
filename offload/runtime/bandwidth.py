"""How fast the bus of a device is: what the floor of a step is made of."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter

import torch

from offload.runtime.host_memory import HostArena
from offload.runtime.registry import Streams
from offload.runtime.transfer import Telemetry, Transfer


@dataclass(frozen=True)
class Bandwidth:
    """Page-locked copies in GB/s: each way alone, and each of two at once, one either way."""

    h2d: float
    d2h: float
    both: float

    def two_way_ms(self, bytes_in: float, bytes_out: float) -> float:
        """How long copies take that start together, each way at most one at a time: slower while both last."""
        shared = min(bytes_in, bytes_out)
        return (shared / self.both + (bytes_in - shared) / self.h2d + (bytes_out - shared) / self.d2h) / 1e6


def measure_bandwidth(streams: Streams, nbytes: int = 256 * 2**20, repeats: int = 6) -> Bandwidth:
    """The median of `repeats` copies of `nbytes`, through the same streams and memory that a mode uses.

    Takes about 0.2 s on a GPU, twice `nbytes` on host and device. On a device without streams it is the host's own
    copying speed, and two copies at once share it.
    """
    arena = HostArena(streams.device)
    host = [arena.allocate(nbytes, "bandwidth").bytes for _ in range(2)]
    there = [torch.empty(nbytes, dtype=torch.uint8, device=streams.device) for _ in range(2)]
    transfer = Transfer(streams, Telemetry(streams))

    def copies(copied_in: bool, copied_out: bool) -> float:
        seconds = []
        for _ in range(repeats):
            streams.synchronize()
            start = perf_counter()
            if copied_in:
                transfer.copy_in(there[0], host[0], done=streams.event(), what="bandwidth")
            if copied_out:
                transfer.copy_out(host[1], there[1], done=streams.event(), what="bandwidth")
            streams.synchronize()
            seconds.append(perf_counter() - start)
        return nbytes / statistics.median(seconds) / 1e9

    found = Bandwidth(copies(True, False), copies(False, True), copies(True, True))
    arena.close()
    return found
