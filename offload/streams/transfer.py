"""Copies between host and device: the one place that queues them, counts their bytes and times the waits for them.

`Transfer` queues copies on the side streams, `Telemetry` holds the counters of one attached model. Nothing else in the
engine copies asynchronously (a test of the architecture holds that).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter

import torch

from offload.streams.registry import Event, Stream, Streams
from offload.torch_private.torch_internals import profiled

# Two events with nothing to wait for between them are microseconds apart, and a step has a thousand such pairs.
RESOLUTION_MS = 0.01

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""destinations and sources of copies"""


class Telemetry:
    """Counters of one model since it was attached: bytes copied in and out, and ms that compute stood still."""

    def __init__(self, streams: Streams):
        self.h2d_bytes = 0
        self.d2h_bytes = 0
        self.stall_ms = 0.0
        self._streams = streams
        self._pending: deque[tuple[Event, Event]] = deque()
        # Events of waits that were counted, for other waits.
        self._spare: list[Event] = []

    @contextmanager
    def stall(self, stream: Stream) -> Iterator[None]:
        """Counts the time that `stream` spends in the waits that are queued inside the block."""
        if not self._streams.asynchronous:
            yield
            return
        before = self._recorded(stream)
        yield
        self._pending.append((before, self._recorded(stream)))

    def _recorded(self, stream: Stream) -> Event:
        event = self._spare.pop() if self._spare else self._streams.event(timing=True)
        event.record(stream)
        return event

    def timestamp(self) -> Event | None:
        """Returns an event that marks this point of the compute stream; None on a device without a clock."""
        if not self._streams.asynchronous:
            return None
        event = self._streams.event(timing=True)
        event.record(self._streams.compute)
        return event

    def collect(self) -> None:
        """Adds the stalls that are over to `stall_ms`, without waiting for the others: a later call adds them."""
        while self._pending and self._pending[0][1].query():
            before, after = self._pending.popleft()
            wait_ms = before.elapsed_time(after)
            self._spare += before, after
            if wait_ms > RESOLUTION_MS:
                self.stall_ms += wait_ms


class Transfer:
    """Queues copies on the side streams of a device.

    No method blocks the host where the device has streams and the host memory is page-locked.
    """

    def __init__(self, streams: Streams, telemetry: Telemetry):
        self.streams = streams
        self.telemetry = telemetry

    def copy_in(self, device_tensor: torch.Tensor, host_tensor: torch.Tensor, done: Event, what: str) -> None:
        """Copies host to device on the h2d stream and then records `done`. Shapes and dtypes must be equal.

        `what` names the copy in a profiler's trace.
        """
        self.copies_in([(device_tensor, host_tensor)], done, what)

    def copies_in(self, pairs: Pairs, done: Event, what: str) -> None:
        """Copies several tensors as `copy_in` does; a pair is the device's tensor and the host's."""
        self.telemetry.h2d_bytes += self._copy(pairs, self.streams.h2d, f"copy in {what}")
        done.record(self.streams.h2d)

    def copy_out(self, host_tensor: torch.Tensor, device_tensor: torch.Tensor, done: Event, what: str) -> None:
        """Copies device to host on the d2h stream and then records `done`. Shapes and dtypes must be equal.

        `what` names the copy in a profiler's trace.
        """
        self.copies_out([(host_tensor, device_tensor)], done, what)

    def copies_out(self, pairs: Pairs, done: Event, what: str) -> None:
        """Copies several tensors as `copy_out` does; a pair is the host's tensor and the device's."""
        self.telemetry.d2h_bytes += self._copy(pairs, self.streams.d2h, f"copy out {what}")
        done.record(self.streams.d2h)

    def after_compute(self, *streams: Stream) -> None:
        """Makes `streams` wait for everything that is queued on the compute stream so far."""
        made = self.streams.event()
        made.record(self.streams.compute)
        for stream in streams:
            stream.wait_event(made)

    def await_on(self, stream: Stream, event: Event) -> None:
        """Makes `stream` wait for the event of a copy, and counts the time that it stands still."""
        if not self.streams.asynchronous or event.query():
            # Nothing to wait for, as the host sees it.
            stream.wait_event(event)
            return
        with self.telemetry.stall(stream):
            stream.wait_event(event)

    def _copy(self, pairs: Pairs, stream: Stream, name: str) -> int:
        start, nbytes = perf_counter(), 0
        with profiled(name), self.streams.on(stream):
            for destination, source in pairs:
                # A copy is not an operation of autograd, and `no_grad` takes longer than to look.
                destination.copy_(source.detach() if source.requires_grad else source, non_blocking=True)
                nbytes += source.nbytes
        if not self.streams.asynchronous:
            # On a device without streams the copy is made at once: compute waits for all of it.
            self.telemetry.stall_ms += (perf_counter() - start) * 1e3
        return nbytes


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Returns a host tensor (a batch, say: any shape and dtype) on `device`. The host does not wait for its queue."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
