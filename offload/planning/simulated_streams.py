"""The machine of a plan: its bus, streams with a clock that work at given speeds, and processes that share homes."""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

import torch

from offload.memory.host_memory import HostArena
from offload.planning.memory_tracker import EVEN
from offload.sharing.sharers import Sharers
from offload.streams.registry import Streams
from offload.streams.stream_checker import CheckedStream, CheckedStreams
from offload.streams.transfer import Telemetry, Transfer

# A stream's time is one more component of its vector clock: events and waits carry it as they carry order.
TIME = "ms"


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


@dataclass(frozen=True)
class Work:
    """One stream is busy from `start_ms` to `end_ms` of the step.

    `lane` is "copy in", "compute" or "copy out", or "exchange" with other devices.
    """

    lane: str
    start_ms: float
    end_ms: float


class SimulatedStreams(CheckedStreams):
    """The stream checker's streams, on which products take time at `flops_per_s`, and copies at `bandwidth`.

    Other operations take time at `memory_gb_s`, GB read and written in the device's memory in a second. A copy that
    begins while the bus is busy the other way has the speed of two copies at once. What the device receives from
    other devices comes at `links_gb_s`, and does not slow copies. A FLOP of a kind in `costs` takes as long as that
    many others. The host takes no time.
    `work` is everything that the streams did since the last `start_step`.
    """

    def __init__(
        self,
        device: torch.device,
        bandwidth: Bandwidth,
        flops_per_s: float,
        memory_gb_s: float = math.inf,
        links_gb_s: float = math.inf,
        costs: Mapping[str, float] = EVEN,
    ):
        super().__init__(device)
        self.work: list[Work] = []
        self._bandwidth = bandwidth
        self._flops_per_s = flops_per_s
        self._memory_gb_s = memory_gb_s
        self._links_gb_s = links_gb_s
        self._costs = costs
        self._began_ms = 0.0

    @property
    def step_ms(self) -> float:
        """The time from the start of the step to the end of its last work."""
        return max((work.end_ms for work in self.work), default=0.0)

    @property
    def host_ms(self) -> float:
        """The time from the start of the step to the end of the work that the host has waited for."""
        return _time(self.host) - self._began_ms

    def start_step(self) -> None:
        """Waits for all streams and starts a step at time 0."""
        self.synchronize()
        self._began_ms = _time(self.host)
        self.work.clear()

    def spend(self, flops: float, copied_bytes: int, memory_bytes: int = 0, kind: str | None = None) -> None:
        """Lets the current stream compute, or copy `copied_bytes` if it is one for copies."""
        stream = self.compute
        stream.follow(self.host.clock)
        start_ms = _time(stream)
        if stream is self.d2h:
            lane, rate = "copy out", self._bandwidth.both if _time(self.h2d) > start_ms else self._bandwidth.d2h
        elif stream is self.h2d:
            lane, rate = "copy in", self._bandwidth.both if _time(self.d2h) > start_ms else self._bandwidth.h2d
        else:
            lane, rate = "compute", None
        if rate is None:
            flops *= self._costs.get(kind, 1.0)
            taken_ms = flops / self._flops_per_s * 1e3 + memory_bytes / self._memory_gb_s / 1e6
        else:
            taken_ms = copied_bytes / rate / 1e6
        self._work(stream, lane, start_ms, taken_ms)

    def exchange(self, nbytes: float) -> None:
        """Lets the current stream receive `nbytes` from other devices."""
        stream = self.compute
        stream.follow(self.host.clock)
        self._work(stream, "exchange", _time(stream), nbytes / self._links_gb_s / 1e6)

    def _work(self, stream: CheckedStream, lane: str, start_ms: float, taken_ms: float) -> None:
        if taken_ms:
            stream.clock[TIME] = end_ms = start_ms + taken_ms
            start_ms, end_ms = start_ms - self._began_ms, end_ms - self._began_ms
            # A step has tens of thousands of operations, most of which begin where another ends.
            if self.work and self.work[-1].lane == lane and self.work[-1].end_ms == start_ms:
                start_ms = self.work.pop().start_ms
            self.work.append(Work(lane, start_ms, end_ms))


def _time(stream: CheckedStream) -> float:
    return stream.clock.get(TIME, 0.0)


class PlannedSharers(Sharers):
    """Those of the first of `count` processes on each of `hosts`, all of which do the same at the same time.

    `exchanged_bytes` are those that one device has received from the others of its host, in all steps. `streams` let
    the time pass that this takes; None: nobody asks for it. Exchanges between hosts are not counted.
    """

    def __init__(self, count: int, hosts: int = 1, streams: SimulatedStreams | None = None):
        self.count = count
        self.hosts = hosts
        self.exchanged_bytes = 0.0
        self._streams = streams

    def exchange(
        self, numbers: Sequence[int], what: str, patient: bool = False, everywhere: bool = False
    ) -> list[list[int]]:
        return [list(numbers)] * (self.count * self.hosts if everywhere else self.count)

    def gather(self, whole: torch.Tensor, what: str) -> None:
        self.receive(whole.nbytes)

    def sum(self, flat: torch.Tensor, what: str) -> None:
        # The others' slices before they are added; over several hosts all that come from one.
        flat.new_empty(flat.numel() if self.hosts > 1 else flat.numel() // self.count * (self.count - 1))
        # Slices, and then their sums.
        self.receive(2 * flat.nbytes)

    def receive(self, nbytes: int) -> None:
        """Counts `nbytes` of which this device has its own part, and gets those of the others."""
        others = nbytes * (self.count - 1) / self.count
        self.exchanged_bytes += others
        if self._streams is not None:
            self._streams.exchange(others)
