"""The streams and events of each device, shared by everything that runs there.

Every mode on a device takes its streams from here, so that two models on one GPU queue their copies behind each
other instead of competing, and so that dropping one model never takes the streams of another away. On a device
without streams (the CPU) the same calls reach `offload.runtime.stream_checker`, which executes in program
order and checks that the waits a GPU would need are all there.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Protocol

import torch

from offload.runtime.stream_checker import CheckedStreams


class Event(Protocol):
    """A point in a stream's work. Recorded again, it marks the new point; earlier waits keep the old one."""

    def record(self, stream: Stream) -> None: ...

    def query(self) -> bool:
        """Whether the work before the point is done."""
        ...

    def synchronize(self) -> None:
        """Blocks the calling thread until the work before the point is done."""
        ...


class Signal(Protocol):
    """What one thread of the host tells others: that something is done, and all that it did before."""

    def set(self) -> None: ...

    def is_set(self) -> bool: ...

    def wait(self) -> None:
        """Blocks the calling thread until the signal is set."""
        ...


class Stream(Protocol):
    """Work that runs in order, beside other streams."""

    def wait_event(self, event: Event) -> None:
        """Later work on this stream starts after `event`; the host does not block."""
        ...


class Streams(Protocol):
    """The streams of one device: the current compute stream and copy streams.

    `h2d` and `d2h` copy in and out. `device` is the device they belong to; `asynchronous` tells whether work outlives
    the call that queues it.
    """

    device: torch.device
    asynchronous: bool
    h2d: Stream
    d2h: Stream

    @property
    def compute(self) -> Stream:
        """The stream that kernels launched now would run on."""
        ...

    def event(self, timing: bool = False) -> Event: ...

    def signal(self) -> Signal: ...

    def beside(self, name: str) -> AbstractContextManager:
        """Around what a thread does beside the host: only signals order the two. Checked by the twin."""
        ...

    def on(self, stream: Stream) -> AbstractContextManager: ...

    def as_here(self) -> Callable[[], AbstractContextManager]:
        """A context for another thread, in which work is queued where the caller's would be."""
        ...

    def reads(self, stream: Stream | None, resource: object, what: str) -> None:
        """Declares that `stream` (None: the host) reads `resource` now. Checked by the twin, free on a GPU."""
        ...

    def writes(self, stream: Stream | None, resource: object, what: str) -> None:
        """Declares that `stream` (None: the host) writes `resource` now."""
        ...

    def synchronize(self) -> None:
        """Blocks the host until every stream of the device is idle."""
        ...


class CudaStreams:
    """`Streams` of one CUDA device."""

    asynchronous = True

    def __init__(self, device: torch.device):
        self.device = device
        self.h2d = torch.cuda.Stream(device)
        self.d2h = torch.cuda.Stream(device)

    @property
    def compute(self) -> torch.cuda.Stream:
        return torch.cuda.current_stream(self.device)

    def event(self, timing: bool = False) -> torch.cuda.Event:
        return torch.cuda.Event(enable_timing=timing)

    def signal(self) -> threading.Event:
        return threading.Event()

    def beside(self, name: str) -> AbstractContextManager:
        return nullcontext()

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager:
        return torch.cuda.stream(stream)

    def as_here(self) -> Callable[[], AbstractContextManager]:
        compute, current = self.compute, torch.cuda.current_device()

        @contextmanager
        def queueing() -> Iterator[None]:
            with torch.cuda.stream(compute), torch.cuda.device(current):
                yield

        return queueing

    def reads(self, stream: object, resource: object, what: str) -> None:
        pass

    def writes(self, stream: object, resource: object, what: str) -> None:
        pass

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)


_lock = threading.Lock()
_open: dict[torch.device, tuple[Streams, int]] = {}


def acquire(device: torch.device | str) -> Streams:
    """The streams of `device`, made on first use; every call is to be matched by one `release`.

    Raises ValueError for a device type other than cuda and cpu.
    """
    device = _with_index(torch.device(device))
    with _lock:
        streams, holders = _open.get(device, (None, 0))
        if streams is None:
            streams = CudaStreams(device) if device.type == "cuda" else CheckedStreams(device)
        _open[device] = (streams, holders + 1)
        return streams


def release(streams: Streams) -> None:
    """Gives back one `acquire`; the last holder's release drops the streams.

    Raises ValueError when `streams` is not in the registry.
    """
    with _lock:
        held, holders = _open.get(streams.device, (None, 0))
        if held is not streams:
            raise ValueError(f"streams of {streams.device} are not in the registry: released once too often?")
        if holders > 1:
            _open[streams.device] = (streams, holders - 1)
        else:
            del _open[streams.device]


def holders(device: torch.device | str) -> int:
    """How many acquired the streams of `device` and have not released them."""
    with _lock:
        return _open.get(_with_index(torch.device(device)), (None, 0))[1]


def _with_index(device: torch.device) -> torch.device:
    if device.type not in ("cuda", "cpu"):
        raise ValueError(f"device {device}: only cuda and cpu devices have streams here")
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
