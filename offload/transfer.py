"""Copies between host and device: the one place that makes them, counts them and times the waits for them."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from time import perf_counter

import torch

from offload.registry import Event, Stream, Streams
from offload.telemetry import Telemetry


class Transfer:
    """Queues copies on the side streams of a device.

    Neither method blocks the host where the device has streams and the host memory is page-locked.
    """

    def __init__(self, streams: Streams, telemetry: Telemetry):
        self.streams = streams
        self.telemetry = telemetry

    def copy_in(
        self,
        device_tensor: torch.Tensor,
        host_tensor: torch.Tensor,
        done: Event,
        what: str,
        stream: Stream | None = None,
    ) -> None:
        """Copies host to device on `stream` (None: h2d) and records `done` behind it. Shapes and dtypes are equal.

        `what` names the copy in a profiler's trace.
        """
        stream = self.streams.h2d if stream is None else stream
        with profiled(f"copy in {what}"):
            self.telemetry.h2d_bytes += self._copy(device_tensor, host_tensor, stream)
        done.record(stream)

    def copy_out(self, host_tensor: torch.Tensor, device_tensor: torch.Tensor, done: Event, what: str) -> None:
        """Copies device to host on the d2h stream and records `done` behind it. Shapes and dtypes are equal.

        `what` names the copy in a profiler's trace.
        """
        with profiled(f"copy out {what}"):
            self.telemetry.d2h_bytes += self._copy(host_tensor, device_tensor, self.streams.d2h)
        done.record(self.streams.d2h)

    def after_compute(self, *streams: Stream) -> None:
        """Makes `streams` wait for all that compute has queued so far."""
        made = self.streams.event()
        made.record(self.streams.compute)
        for stream in streams:
            stream.wait_event(made)

    def await_on(self, stream: Stream, event: Event) -> None:
        """Makes `stream` wait for a copy's event, and counts the time that it stands still."""
        with self.telemetry.stall(stream):
            stream.wait_event(event)

    def _copy(self, destination: torch.Tensor, source: torch.Tensor, stream: Stream) -> int:
        start = perf_counter()
        with torch.no_grad(), self.streams.on(stream):
            destination.copy_(source, non_blocking=True)
        if not self.streams.asynchronous:
            # The twin copies where it stands: all of the copy's time is time that compute waits.
            self.telemetry.stall_ms += (perf_counter() - start) * 1e3
        return source.nbytes


def profiled(name: str) -> AbstractContextManager:
    """A range in a profiler's trace, on whichever thread; nothing where none runs."""
    # Opening a range costs microseconds, also when nobody records it.
    return torch.profiler.record_function(name) if torch.autograd.profiler._is_profiler_enabled else nullcontext()


def upload(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A host tensor (a batch of tokens, say) on `device`, without the host waiting for the device's queue."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
