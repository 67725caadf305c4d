"""The CPU twin of a device's streams: program order in execution, a GPU's freedom in checking.

On a GPU a missing wait shows as a wrong number now and then. Here each stream carries a vector clock (Mattern 1989;
the happens-before test is that of FastTrack, Flanagan and Freund 2009): work on a stream advances its clock, an event
keeps a copy of it, a wait merges the event's clock in. Two accesses to one resource, at least one of them a write,
must be ordered by these clocks; if they are not, a GPU may run them in either order, and `StreamOrderError` says so
at once, although this run, in program order, computed the right thing.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

Clock = dict[str, int]


class StreamOrderError(RuntimeError):
    """Two accesses to one resource that no event orders. The message names both."""


class CheckedEvent:
    """An event of the twin: a copy of the clock of the stream that recorded it."""

    def __init__(self, host: CheckedStream):
        self._host = host
        self.clock: Clock = {}

    def record(self, stream: CheckedStream) -> None:
        stream.follow(self._host.clock)
        self.clock = dict(stream.clock)

    def synchronize(self) -> None:
        self._host.follow(self.clock)


class CheckedStream:
    """A stream of the twin, named for messages; its clock counts the work seen from each stream."""

    def __init__(self, name: str):
        self.name = name
        self.clock: Clock = {name: 0}

    def wait_event(self, event: CheckedEvent) -> None:
        self.follow(event.clock)

    def follow(self, clock: Clock) -> None:
        for name, tick in clock.items():
            self.clock[name] = max(self.clock.get(name, 0), tick)

    def advance(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]


@dataclass(frozen=True)
class Access:
    """One declared read or write: who, when on his own clock, and what for."""

    stream: str
    tick: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.tick


@dataclass
class _History:
    """The accesses of one resource that a later access still has to be ordered after."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


class CheckedStreams:
    """`offload.registry.Streams` for a device without streams.

    Work runs where it is called. The host is a stream too: whatever it did before it queues work is done when that
    work starts, but it sees a stream's work only after `Event.synchronize`.
    """

    asynchronous = False

    def __init__(self, device: torch.device):
        self.device = device
        self.host = CheckedStream("host")
        self.h2d = CheckedStream("h2d")
        self.d2h = CheckedStream("d2h")
        self._compute = CheckedStream("compute")
        self._current = self._compute
        self._histories: weakref.WeakKeyDictionary[object, _History] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def compute(self) -> CheckedStream:
        return self._current

    def event(self, timing: bool = False) -> CheckedEvent:
        return CheckedEvent(self.host)

    @contextmanager
    def on(self, stream: CheckedStream) -> Iterator[None]:
        before, self._current = self._current, stream
        try:
            yield
        finally:
            self._current = before

    def reads(self, stream: CheckedStream | None, resource: object, what: str) -> None:
        with self._lock:
            history, access, clock = self._access(stream, resource, what)
            if history.write is not None and not history.write.before(clock):
                raise _unordered(resource, history.write, access)
            history.reads[access.stream] = access

    def writes(self, stream: CheckedStream | None, resource: object, what: str) -> None:
        with self._lock:
            history, access, clock = self._access(stream, resource, what)
            for earlier in filter(None, (history.write, *history.reads.values())):
                if not earlier.before(clock):
                    raise _unordered(resource, earlier, access)
            history.write, history.reads = access, {}

    def synchronize(self) -> None:
        for stream in (self.h2d, self.d2h, self._compute):
            self.host.follow(stream.clock)

    def _access(self, stream: CheckedStream | None, resource: object, what: str):
        stream = stream or self.host
        stream.follow(self.host.clock)
        access = Access(stream.name, stream.advance(), what)
        return self._histories.setdefault(resource, _History()), access, stream.clock


def _unordered(resource: object, earlier: Access, later: Access) -> StreamOrderError:
    return StreamOrderError(
        f"{resource}: '{later.what}' on {later.stream} may run before '{earlier.what}' on {earlier.stream} is done:"
        " no event orders them"
    )
