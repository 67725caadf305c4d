"""The stream checker: streams for the CPU that execute in program order, and check for the order that a GPU needs.

On a GPU a missing wait shows as a wrong number now and then. Here each stream has a vector clock (Mattern 1989; the
happens-before test is that of FastTrack, Flanagan and Freund 2009): work on a stream advances its clock, an event
keeps a copy of it, and a wait merges the clock of the event into that of the stream. Two accesses to one resource, at
least one of them a write, must be ordered by these clocks. If they are not, a GPU may run them in either order:
`StreamOrderError` is raised at once, although this run, in program order, computed the right result.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from offload.streams.device_work import DeviceWork, Home

Clock = dict[str, int]


class StreamOrderError(RuntimeError):
    """Raised for two accesses to one resource that no event orders. The message names both."""


class CheckedEvent:
    """An event: a copy of the clock of the stream that recorded it."""

    def __init__(self, streams: CheckedStreams):
        self._streams = streams
        self.clock: Clock = {}

    def record(self, stream: CheckedStream) -> None:
        stream.follow(self._streams.host.clock)
        self.clock = dict(stream.clock)

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        self._streams.host.follow(self.clock)


class CheckedSignal:
    """A signal: the clock of the thread that set it, which the threads that wait for it merge into theirs."""

    def __init__(self, streams: CheckedStreams):
        self._streams = streams
        self._set = threading.Event()
        self.clock: Clock = {}

    def set(self) -> None:
        self.clock = dict(self._streams.host.clock)
        self._set.set()

    def is_set(self) -> bool:
        return self._set.is_set()

    def wait(self) -> None:
        self._set.wait()
        self.follow()

    def follow(self) -> None:
        self._streams.host.follow(self.clock)


class CheckedStream:
    """A stream, with a name for messages. Its clock has the last work of each stream that is done before its next."""

    def __init__(self, name: str):
        self.name = name
        self.clock: Clock = {name: 0}

    def wait_event(self, event: CheckedEvent) -> None:
        self.follow(event.clock)

    def follow(self, clock: Clock) -> None:
        own = self.clock
        for name, tick in clock.items():
            if tick > own.get(name, 0):
                own[name] = tick

    def advance(self) -> int:
        self.clock[self.name] += 1
        return self.clock[self.name]


@dataclass(frozen=True)
class Access:
    """One declared read or write: the stream, the time on its own clock, and the purpose."""

    stream: str
    tick: int
    what: str

    def before(self, clock: Clock) -> bool:
        return clock.get(self.stream, 0) >= self.tick


@dataclass
class _History:
    """The accesses to one resource that a later access must be ordered after."""

    write: Access | None = None
    reads: dict[str, Access] = field(default_factory=dict)


class CheckedStreams:
    """`offload.streams.registry.Streams` for a device without streams.

    Work runs when it is queued. The host counts as a stream, too: what it did before it queues work is done when that
    work starts, but it sees the work of a stream only after `Event.synchronize`. A thread inside `beside` is a host of
    its own, which sees the work of the other only after `Signal.wait`.
    """

    asynchronous = False

    def __init__(self, device: torch.device):
        self.device = device
        # The host and the current stream of a thread, where it has others than the main ones.
        self._thread = threading.local()
        self._host = CheckedStream("host")
        self.h2d = CheckedStream("h2d")
        self.d2h = CheckedStream("d2h")
        self.gather = CheckedStream("gather")
        self._compute = CheckedStream("compute")
        self._histories: weakref.WeakKeyDictionary[object, _History] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def host(self) -> CheckedStream:
        return getattr(self._thread, "host", self._host)

    @property
    def compute(self) -> CheckedStream:
        return getattr(self._thread, "stream", self._compute)

    def event(self, timing: bool = False) -> CheckedEvent:
        return CheckedEvent(self)

    def signal(self) -> CheckedSignal:
        return CheckedSignal(self)

    @contextmanager
    def beside(self, name: str) -> Iterator[None]:
        self._thread.host = CheckedStream(name)
        try:
            yield
        finally:
            del self._thread.host

    @contextmanager
    def on(self, stream: CheckedStream) -> Iterator[None]:
        before, self._thread.stream = self.compute, stream
        try:
            yield
        finally:
            self._thread.stream = before

    def thread_context(self) -> Callable[[], AbstractContextManager]:
        return nullcontext

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

    def device_work(self, homes: Callable[[], Iterable[Home]]) -> AbstractContextManager:
        if self.device.type == "meta":
            return nullcontext()
        return DeviceWork(homes(), lambda: self.compute is self._compute)

    def synchronize(self) -> None:
        for stream in (self.h2d, self.d2h, self.gather, self._compute):
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
