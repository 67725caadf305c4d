"""Updates of units on the host, beside the device: begun as gradients land, waited for where a unit is next used.

A worker thread takes, of the gradients that have landed, those of the unit that the next forward needs first. So the
update of a step is hidden behind its own backward and the next forward, and is exact: no unit is used before its
updates are done, and for nothing else is waited.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from offload.optimizer.adamw import Claim, HostAdamW
from offload.runtime.counters import Counters
from offload.runtime.registry import Event, Signal, Streams
from offload.runtime.transfer import profiled
from offload.weights.units import OffloadUnit, UnitTensor


@dataclass(eq=False)
class _Job:
    """An update of some of a unit's tensors: what to do, when their gradients are there and they may be written, and
    when it is done."""

    unit: OffloadUnit
    tensors: list[UnitTensor]
    claims: list[Claim]
    scale: float
    first_use: float
    landed: list[Event]
    offered: Signal
    done: Signal
    parameters: int = field(init=False)

    def __post_init__(self) -> None:
        self.parameters = sum(claim.parameter.numel() for claim in self.claims)

    def has_landed(self) -> bool:
        return all(event.query() for event in self.landed)


class UpdateWorker:
    """The updates of one attached model's units by `optimizer`, on a thread of its own.

    `first_use` says when the next forward uses a unit: the lower, the sooner. An error of the worker ends it, and is
    raised, with the worker's traceback, by whatever waits next.
    """

    def __init__(self, optimizer: HostAdamW, streams: Streams, first_use: Callable[[OffloadUnit], float]):
        self.host_ms = 0.0
        self.wait_ms = 0.0
        self.parameters = 0
        self._optimizer = optimizer
        self._streams = streams
        self._first_use = first_use
        self._jobs: dict[OffloadUnit, list[_Job]] = {}
        self._coming: deque[_Job] = deque()
        self._landed: list[_Job] = []
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def offer(
        self, unit: OffloadUnit, tensors: Iterable[UnitTensor], scale: float = 1.0, after: Iterable[Event] = ()
    ) -> None:
        """The gradients of these `tensors` of the unit are on their way to the host and final: once they have landed,
        they are updated.

        `after` ends what else must be over first. Gradients count `scale` times. What has no gradient, or was offered
        in this step, is left out.
        """
        tensors = list(tensors)
        claims = self._optimizer.claim(tensor.host for tensor in tensors)
        if not claims:
            return
        landed = [tensor.landed for tensor in tensors if tensor.landed is not None]
        landed += after
        signals = self._streams.signal(), self._streams.signal()
        job = _Job(unit, tensors, claims, scale, self._first_use(unit), landed, *signals)
        job.offered.set()
        self._start()
        with self._changed:
            self._raise_error()
            self._jobs.setdefault(unit, []).append(job)
            self._coming.append(job)
            self._changed.notify_all()

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Whether updates of the unit are still to be waited for."""
        jobs = self._jobs.get(unit)
        if jobs and all(job.done.is_set() for job in jobs):
            self.wait(unit)
        return unit in self._jobs

    def wait(self, unit: OffloadUnit) -> None:
        """Blocks the host until the unit's updates are done. Raises what the worker raised."""
        start = perf_counter()
        for job in self._jobs.pop(unit, ()):
            job.done.wait()
        self.wait_ms += (perf_counter() - start) * 1e3
        self._raise_error()

    def finish(self) -> None:
        """Blocks the host until all updates are done. Raises the worker's error, now and later."""
        for unit in list(self._jobs):
            self.wait(unit)
        self._raise_error()

    def counters(self) -> Counters:
        """Counts the updates made, how long they took and how long the host waited for them."""
        return Counters(update_ms=self.host_ms, update_wait_ms=self.wait_ms, updated_parameters=self.parameters)

    def close(self) -> None:
        """Ends the worker when it has made the updates that were offered, or at once if it failed.

        Does not raise what the worker raised.
        """
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)
        for job in itertools.chain.from_iterable(self._jobs.values()):
            job.done.wait()
        self._jobs.clear()

    def _start(self) -> None:
        if self._thread is not None:
            return
        thread = threading.Thread(target=self._work, name="host optimizer", daemon=True)
        thread.start()
        self._thread = thread
        # A process that ends without `close` would end the thread inside an update, and abort.
        atexit.register(self.close)

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error

    def _work(self) -> None:
        with self._streams.beside("worker"):
            try:
                while (job := self._next()) is not None:
                    self._update(job)
                    self._end(job)
            except BaseException as error:
                self._fail(error)

    def _next(self) -> _Job | None:
        """The next job, None when there will be none: of those that have landed, the one needed first."""
        with self._changed:
            while not self._coming and not self._landed:
                if self._closed:
                    return None
                self._changed.wait()
            # They land in the order of their offers. To ask each of a hundred takes a while, so none is asked behind
            # one that has not.
            while self._coming and self._coming[0].has_landed():
                self._landed.append(self._coming.popleft())
            if not self._landed:
                self._landed.append(self._coming.popleft())
            return min(self._landed, key=lambda job: job.first_use)

    def _update(self, job: _Job) -> None:
        streams = self._streams
        job.offered.wait()
        for event in job.landed:
            event.synchronize()
        for tensor in job.tensors:
            streams.reads(None, tensor, "update")
        streams.writes(None, job.unit.weights, "update")
        start = perf_counter()
        with profiled(f"update {job.unit.name}"):
            self._optimizer.apply(job.claims, job.scale)
        self.host_ms += (perf_counter() - start) * 1e3
        self.parameters += job.parameters

    def _end(self, job: _Job) -> None:
        with self._changed:
            self._landed.remove(job)
        job.done.set()

    def _fail(self, error: BaseException) -> None:
        # The error first: who is woken looks for it.
        with self._changed:
            self._error = error
            for job in itertools.chain(self._coming, self._landed):
                job.done.set()
            self._coming.clear()
            self._landed.clear()
