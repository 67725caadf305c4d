"""The stream checker: streams for the CPU that execute in program order, and check for the order that a GPU needs.

On a GPU a missing wait shows as a wrong number now and then. Here each stream has a vector clock (Mattern 1989; the
happens-before test is that of FastTrack, Flanagan and Freund 2009): work on a stream advances its clock, an event
keeps a copy of it, and a wait merges the clock of the event into that of the stream. Two accesses to one resource, at
least one of them a write, must be ordered by these clocks. If they are not, a GPU may run them in either order:
`StreamOrderError` is raised at once, although this run, in program order, computed the right result.

`DeviceWork` finds host memory in the operations of a forward. On a GPU torch refuses an operation of tensors on the
host and on the device; the CPU, which is its own host, computes the right numbers. So memory at home, and what is
computed from it alone, is taken for the host's, and all else for the device's.
"""

from __future__ import annotations

import threading
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from offload.torch_private import saved_tensor_hooks
from offload.torch_private.tensor_parts import any_wraps
from offload.torch_private.torch_internals import StorageWeakRef, UncompiledMode, autocast_of_caller, trilinear

# Host memory of weights, and their name. The tensor keeps its addresses from being used for anything else.
Home = tuple[torch.Tensor, str]
# They may copy between host and device.
COPIES = {"aten::copy_", "aten::_to_copy"}


class HostOperandError(RuntimeError):
    """Raised for an operation of host memory and device memory, which a GPU could not run."""


class DeviceWork(UncompiledMode):
    """Raises HostOperandError for operations inside the block that take tensors at `homes` and tensors of the device.

    `on_compute` tells whether an operation runs on the device's compute stream; the engine's copies do not.
    """

    def __init__(self, homes: Iterable[Home], on_compute: Callable[[], bool]):
        super().__init__()
        self._homes = sorted(homes, key=lambda home: home[0].data_ptr())
        self._starts = [memory.data_ptr() for memory, _ in self._homes]
        self._ends = [memory.data_ptr() + memory.nbytes for memory, _ in self._homes]
        self._on_compute = on_compute
        # Storages that were made inside the block: True for those of the host, False for those of either side.
        self._made: dict[int, tuple[StorageWeakRef, bool]] = {}

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        keywords = keywords or {}
        if types and any_wraps(types):
            # Its own operations come here one by one. A selective checkpoint outside of this mode has to see the whole.
            return function(*arguments, **keywords) if saved_tensor_hooks.here.depth else NotImplemented
        if not self._on_compute():
            return function(*arguments, **keywords)
        operands = [tensor for tensor in _tensors((*arguments, *keywords.values())) if tensor.dim()]
        sides = {self._is_host(tensor) for tensor in operands}
        if True in sides and False in sides and function.name().partition(".")[0] not in COPIES:
            home = next(filter(None, map(self._home, operands)), "memory computed from it")
            raise HostOperandError(
                f"{home}: {function} takes it in host memory together with tensors of the device, inside a forward."
                " Read a weight as an attribute of its module while the model's forward runs, or leave its module out"
                " of the mode with `exclude`"
            )
        if function.namespace == "aten" and function is not trilinear:
            result = function(*arguments, **keywords)
        else:
            with autocast_of_caller():
                result = function(*arguments, **keywords)
        # A copy to a device that is named, as by `tensor.to(device, copy=True)`, is there.
        is_sent = keywords.get("device") is not None and function.name() in COPIES
        if False not in sides and not is_sent:
            for tensor in _tensors(result if isinstance(result, (tuple, list)) else (result,)):
                self._note(tensor, is_host=True in sides)
        return result

    def _is_host(self, tensor: torch.Tensor) -> bool | None:
        """True for host memory, False for the device's, None for what may be on either side."""
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        if index >= 0 and address < self._ends[index]:
            return True
        made = self._made.get(address)
        if made is None or made[0].expired():
            return False
        return made[1] or None

    def _home(self, tensor: torch.Tensor) -> str | None:
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        return self._homes[index][1] if index >= 0 and address < self._ends[index] else None

    def _note(self, tensor: torch.Tensor, is_host: bool) -> None:
        if tensor.numel():
            self._made[tensor.data_ptr()] = StorageWeakRef(tensor.untyped_storage()), is_host


def _tensors(values: Iterable[object]) -> Iterable[torch.Tensor]:
    """Yields the tensors that have memory, also those in lists."""
    for value in values:
        if isinstance(value, torch.Tensor):
            if value.is_cpu and value.layout is torch.strided:
                yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


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

    def query(self) -> bool:
        """Returns True: work on the CPU is done when it has been given."""
        return True

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


class _Thread(threading.local):
    """The host and the current stream of a thread, where it has others than the main ones."""

    host: CheckedStream | None = None
    stream: CheckedStream | None = None


class CheckedStreams:
    """`offload.streams.registry.Streams` for a device without streams. Work runs when it is queued.

    The host counts as a stream: what it did before it queues work is done when that starts, but it sees the work of a
    stream only after `Event.synchronize`. A thread inside `beside` is another host, seen after `Signal.wait`.
    """

    asynchronous = False

    def __init__(self, device: torch.device):
        self.device = device
        self._thread = _Thread()
        self._host = CheckedStream("host")
        self.h2d = CheckedStream("h2d")
        self.d2h = CheckedStream("d2h")
        self.gather = CheckedStream("gather")
        self._compute = CheckedStream("compute")
        self._histories: weakref.WeakKeyDictionary[object, _History] = weakref.WeakKeyDictionary()
        self._lock = threading.Lock()

    @property
    def host(self) -> CheckedStream:
        return self._thread.host or self._host

    @property
    def compute(self) -> CheckedStream:
        return self._thread.stream or self._compute

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
