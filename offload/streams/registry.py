"""The streams and events of each device, shared by all modes that run there.

The code that attaches a mode takes the streams of its device from here with `acquire`, and gives them back with
`release`. So two models on one GPU queue their copies one after the other instead of competing, and dropping one model
never takes the streams away from another. Streams that nobody refers to any more are dropped also where a `release` was
forgotten. On the CPU, which has no streams, the same calls reach `stream_checker`, which executes in program order and
checks that every wait that a GPU would need was queued.

`Streams`, `Stream`, `Event` and `Signal` are of either kind. `Points` are events of several streams.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from time import perf_counter

import torch

from offload.streams.stream_checker import CheckedEvent, CheckedSignal, CheckedStream, CheckedStreams, Home
from offload.torch_private.torch_internals import current_device_index, current_stream_handle


class CudaStreams:
    """The streams of one CUDA device: the current compute stream, and copy streams.

    `h2d` and `d2h` copy in and out, on `gather` devices exchange slices of weights. Work of one stream runs in order,
    that of different streams in any order. `asynchronous` tells whether work outlives the call that queues it.
    """

    asynchronous = True

    def __init__(self, device: torch.device):
        self.device = device
        self.h2d = torch.cuda.Stream(device)
        self.d2h = torch.cuda.Stream(device)
        self.gather = torch.cuda.Stream(device)
        self._by_handle: dict[int, torch.cuda.Stream] = {}

    @property
    def compute(self) -> torch.cuda.Stream:
        """The stream on which kernels that are launched now run."""
        # torch makes a new object each time, which takes microseconds, and a step asks thousands of times.
        handle = current_stream_handle(self.device.index)
        if handle not in self._by_handle:
            self._by_handle[handle] = torch.cuda.current_stream(self.device)
        return self._by_handle[handle]

    def event(self, timing: bool = False) -> torch.cuda.Event:
        """Returns a point in the work of a stream. Recorded again it marks a new one; earlier waits keep the old."""
        return torch.cuda.Event(enable_timing=timing)

    def signal(self) -> threading.Event:
        """Returns what tells other threads of the host that one has done something, and everything before it."""
        return threading.Event()

    def beside(self, name: str) -> AbstractContextManager:
        """Surrounds the work of a thread beside the main one. Only signals order the two, as the checker checks."""
        return nullcontext()

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        if current_device_index() == self.device.index:
            return _OnStream(stream, self.compute)
        return torch.cuda.stream(stream)

    def thread_context(self) -> Callable[[], AbstractContextManager]:
        """Returns a maker of contexts for other threads, whose work in them is queued where the caller's would be."""
        compute, current = self.compute, torch.cuda.current_device()

        @contextmanager
        def queueing() -> Iterator[None]:
            with torch.cuda.stream(compute), torch.cuda.device(current):
                yield

        return queueing

    def reads(self, stream: Stream | None, resource: object, what: str) -> None:
        """Declares that `stream` (None: the host) reads `resource` in the work that it is given next.

        The stream checker raises StreamOrderError if nothing orders the read after the last write. On a GPU this does
        nothing. `resource` is any object that stands for the memory, `what` names the access in the message.
        """

    def writes(self, stream: Stream | None, resource: object, what: str) -> None:
        """Declares a write, like `reads`. It must be ordered after the last write and all reads since."""

    def device_work(self, homes: Callable[[], Iterable[Home]]) -> AbstractContextManager:
        """Surrounds a forward, whose operations run on the device. `homes` are the host memory of weights.

        The stream checker raises HostOperandError for an operation that takes both; on a GPU torch itself refuses it.
        """
        return nullcontext()

    def synchronize(self) -> None:
        """Blocks the host until every stream of the device is idle."""
        torch.cuda.synchronize(self.device)


class _OnStream:
    """Makes `stream` the current one of the current device, and then `before` again: a short `torch.cuda.stream`."""

    __slots__ = ("_before", "_stream")

    def __init__(self, stream: torch.cuda.Stream, before: torch.cuda.Stream):
        self._stream, self._before = stream, before

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._stream)

    def __exit__(self, *_: object) -> None:
        torch.cuda.set_stream(self._before)


Stream = torch.cuda.Stream | CheckedStream
Event = torch.cuda.Event | CheckedEvent
Signal = threading.Event | CheckedSignal
Streams = CudaStreams | CheckedStreams

_lock = threading.Lock()
# Weak references: a mode that was dropped without `detach`, after an error in a notebook say, is released by nobody.
_open: dict[torch.device, tuple[weakref.ref[Streams], int]] = {}


def acquire(device: torch.device | str) -> Streams:
    """Returns the streams of `device`, made on first use. Every call must be matched by one `release`.

    Raises ValueError for a device type other than cuda and cpu, and for cuda where torch finds no such device.
    """
    device = _with_index(torch.device(device))
    with _lock:
        streams, holders = _registered(device)
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else CheckedStreams(device)
        _open[device] = (weakref.ref(streams), holders + 1)
        return streams


def release(streams: Streams) -> None:
    """Ends one `acquire`; the last one drops the streams.

    Raises ValueError if `streams` is not in the registry.
    """
    with _lock:
        registered, holders = _registered(streams.device)
        if registered is not streams:
            raise ValueError(f"streams of {streams.device} are not in the registry: released once too often?")
        if holders > 1:
            _open[streams.device] = (weakref.ref(streams), holders - 1)
        else:
            del _open[streams.device]


def holders(device: torch.device | str) -> int:
    """Returns how many times the streams of `device` were acquired and not yet released."""
    with _lock:
        return _registered(_with_index(torch.device(device)))[1]


def _registered(device: torch.device) -> tuple[Streams | None, int]:
    """Returns the streams of `device` and the number of holders; None and 0 where nobody refers to them."""
    reference, holders = _open.get(device, (None, 0))
    streams = None if reference is None else reference()
    return (None, 0) if streams is None else (streams, holders)


def _with_index(device: torch.device) -> torch.device:
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {device}: only cuda and cpu devices have streams here")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {device}: torch {torch.__version__} finds no CUDA device: take cpu")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device


def device_wait_ms(streams: Streams, wait: Callable[[], object], blocks: bool = True) -> float:
    """Calls `wait`, which blocks the host. Returns the ms that it took, or 0 if compute has work left even then.

    `blocks`: False where it is known to return at once, which counts as 0 and asks no stream.
    """
    start = perf_counter()
    wait()
    return (perf_counter() - start) * 1e3 if blocks and streams.compute.query() else 0.0


class Points:
    """Streams on which parts of something are made, and, once all parts are queued, a point of each.

    Autograd runs an operation of backward on the stream of its forward, so the gradients of one layer may be made on
    several.
    """

    def __init__(self, streams: Streams):
        self._streams = streams
        self._events: dict[Stream, Event] = {}

    def note(self) -> None:
        """Notes that the stream on which kernels are launched now makes a part."""
        if self._streams.compute not in self._events:
            self._events[self._streams.compute] = self._streams.event()

    def record(self) -> None:
        """Marks where each stream is now."""
        for stream, event in self._events.items():
            event.record(stream)

    def hold_up(self, stream: Stream) -> None:
        """Makes `stream` wait for what was marked last."""
        for event in self._events.values():
            stream.wait_event(event)

    def clear(self) -> None:
        """Forgets the streams."""
        self._events.clear()
