"""Copies between host and device: the one place that queues them, counts their bytes and times the waits for them.

`Transfer` queues copies on the side streams, `Telemetry` counts those of one attached model, `Counters` are what its
user reads. Nothing else in the engine copies asynchronously (a test of the architecture holds that).

Device memory that a copy still uses is freed later, without stopping the host. torch's allocator gives memory out again
as soon as the host drops the last reference to it, in the order of the stream that it was allocated on, when a copy on
another stream may not be done. So the memory stays referenced, as a `PendingFree`, until that stream has been made to
wait for the copy: the later, the shorter the wait. `DeferredFrees` bounds the memory that is pending. `StashedTensors`
stands before it: tensors that may be wanted again soon stay there as long as there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from time import perf_counter

import torch

from offload.streams.registry import Event, Stream, Streams
from offload.torch_private.torch_internals import profiled

# Amounts at this moment. The other counters only grow.
LEVELS = ("host_pinned_bytes", "host_pageable_bytes")


@dataclass(frozen=True, kw_only=True)
class Counters:
    """Totals since the mode was attached, and the host memory at this moment.

    `weights + activations` are the counters of a mode made of both: all add up. `later - earlier` is what happened
    between two readings of one mode: totals are the growth, and the levels (`LEVELS`) are those of `later`, because a
    difference of two amounts is not an amount.

    Attributes:
        h2d_bytes, d2h_bytes: copied from host to device and back, activations included.
        activation_h2d_bytes, activation_d2h_bytes: of these, activations.
        stall_ms: compute stood still for copies; None where they are not timed, also in sums and differences.
        waited_for_bytes: copied while compute stood still, where each copy is waited for.
        swapped_bytes: activations that went to the host to free their memory.
        released_bytes: of these, those whose device memory was free until they were wanted back.
        update_ms: updates took on the host. `update_wait_ms`: the host waited for updates until compute had no work.
        updated_parameters: parameters that were updated on the host beside the device.
        speculated_parameters: of these, inside backward, before it was known whether the update had to be undone.
        undone_parameters: of these, those whose update was undone. `undo_ms`: that took on the host.
        file_bytes: read from files of weights. `file_wait_ms`: the host waited for these reads.
        host_pinned_bytes, host_pageable_bytes: host memory that the mode has now, page-locked and not; of page-locked
            memory that several processes share, this one's part.
    """

    h2d_bytes: float = 0
    d2h_bytes: float = 0
    activation_h2d_bytes: float = 0
    activation_d2h_bytes: float = 0
    stall_ms: float | None = 0.0
    waited_for_bytes: float = 0
    swapped_bytes: float = 0
    released_bytes: float = 0
    update_ms: float = 0.0
    update_wait_ms: float = 0.0
    updated_parameters: float = 0
    speculated_parameters: float = 0
    undone_parameters: float = 0
    undo_ms: float = 0.0
    file_bytes: float = 0
    file_wait_ms: float = 0.0
    host_pinned_bytes: int = 0
    host_pageable_bytes: int = 0

    def __add__(self, other: Counters) -> Counters:
        return Counters(**{name: _sum(one, two) for name, one, two in self._pairs(other)})

    def __sub__(self, earlier: Counters) -> Counters:
        return Counters(
            **{
                name: now if name in LEVELS else None if now is None or then is None else now - then
                for name, now, then in self._pairs(earlier)
            }
        )

    def _pairs(self, other: Counters) -> list[tuple[str, float | None, float | None]]:
        return [(entry.name, getattr(self, entry.name), getattr(other, entry.name)) for entry in fields(self)]


def _sum(one: float | None, two: float | None) -> float | None:
    return None if one is None or two is None else one + two


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
