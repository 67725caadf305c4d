"""Streams that keep time: when each of them does what in a rehearsed step, on a machine of given speeds."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from offload.runtime.bandwidth import Bandwidth
from offload.runtime.stream_checker import CheckedStream, CheckedStreams

# A stream's time is one more component of its vector clock: events and waits carry it as they carry order.
TIME = "ms"


@dataclass(frozen=True)
class Work:
    """What one stream does from `start_ms` to `end_ms` of the step: "copy in", "compute" or "copy out"."""

    lane: str
    start_ms: float
    end_ms: float


class SimulatedStreams(CheckedStreams):
    """The twin's streams, on which arithmetic takes time at `flops_per_s`, and copies at `bandwidth`.

    A copy that begins while the bus is busy the other way goes at the speed of both at once. The host takes no time.
    `work` is that of the step that began last.
    """

    def __init__(self, device: torch.device, bandwidth: Bandwidth, flops_per_s: float):
        super().__init__(device)
        self.work: list[Work] = []
        self._bandwidth = bandwidth
        self._flops_per_s = flops_per_s
        self._began_ms = 0.0

    @property
    def step_ms(self) -> float:
        """When the last work of the step ends."""
        return max((work.end_ms for work in self.work), default=0.0)

    def start_step(self) -> None:
        """All streams are idle, and what they do from now on belongs to a new step."""
        self.synchronize()
        self._began_ms = _time(self.host)
        self.work.clear()

    def spend(self, flops: float, copied_bytes: int) -> None:
        """The current stream computes `flops`, or, if it is one that copies, copies so many bytes."""
        stream = self.compute
        stream.follow(self.host.clock)
        start_ms = _time(stream)
        if stream is self.d2h:
            lane, rate = "copy out", self._bandwidth.both if _time(self.h2d) > start_ms else self._bandwidth.d2h
        elif stream is self.h2d:
            lane, rate = "copy in", self._bandwidth.both if _time(self.d2h) > start_ms else self._bandwidth.h2d
        else:
            lane, rate = "compute", None
        taken_ms = flops / self._flops_per_s * 1e3 if rate is None else copied_bytes / rate / 1e6
        if taken_ms:
            stream.clock[TIME] = start_ms + taken_ms
            self.work.append(Work(lane, start_ms - self._began_ms, start_ms + taken_ms - self._began_ms))


def _time(stream: CheckedStream) -> float:
    return stream.clock.get(TIME, 0.0)
