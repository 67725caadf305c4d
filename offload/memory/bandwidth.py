"""The bandwidth of the bus between host and device: the lower bound of a step's time is made of it."""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from time import perf_counter

import torch

from offload.memory.host_memory import HostArena
from offload.streams.registry import Streams
from offload.streams.transfer import Telemetry, Transfer


@dataclass(frozen=True)
class Bandwidth:
    """Speed of page-locked copies in GB/s: in, out, and of each of two copies at once, one in and one out."""

    h2d: float
    d2h: float
    both: float

    def two_way_ms(self, bytes_in: float, bytes_out: float) -> float:
        """Returns how long copies take that start together, in ms.

        Each way has at most one copy at a time; both are slower while both ways are busy.
        """
        shared = min(bytes_in, bytes_out)
        return (shared / self.both + (bytes_in - shared) / self.h2d + (bytes_out - shared) / self.d2h) / 1e6


def measure_bandwidth(streams: Streams, nbytes: int = 256 * 2**20, repeats: int = 6) -> Bandwidth:
    """Measures the median speed of `repeats` copies of `nbytes`, through the streams and memory that a mode uses.

    Takes about 0.2 s on a GPU, and twice `nbytes` on host and device. On a device without streams it is the copying
    speed of the host itself, which two copies at once share.
    """
    arena = HostArena(streams.device)
    on_host = [arena.allocate(nbytes, "bandwidth").bytes for _ in range(2)]
    on_device = [torch.empty(nbytes, dtype=torch.uint8, device=streams.device) for _ in range(2)]
    transfer = Transfer(streams, Telemetry(streams))

    def gb_s(copies_in: bool, copies_out: bool) -> float:
        seconds = []
        for _ in range(repeats):
            streams.synchronize()
            start = perf_counter()
            if copies_in:
                transfer.copy_in(on_device[0], on_host[0], done=streams.event(), what="bandwidth")
            if copies_out:
                transfer.copy_out(on_host[1], on_device[1], done=streams.event(), what="bandwidth")
            streams.synchronize()
            seconds.append(perf_counter() - start)
        return nbytes / statistics.median(seconds) / 1e9

    measured = Bandwidth(h2d=gb_s(True, False), d2h=gb_s(False, True), both=gb_s(True, True))
    arena.close()
    return measured
