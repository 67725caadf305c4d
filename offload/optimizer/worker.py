"""Makes updates of units on a thread of the host, while the device computes the step.

The worker chooses, among the updates whose gradients have landed, those of the unit that the next forward needs first.
So the updates of a step are hidden behind its own backward and the next forward. They are exact: a unit is used after
its own updates, and waits for no others.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from offload.streams.registry import Event, Signal, Streams
from offload.streams.transfer import Counters, profiled
from offload.weights.gradients.offloader import RingBlock
from offload.weights.units.unit import GradientSlot, OffloadUnit

# Each thread has a clock of its own in the stream checker.
_numbers = itertools.count(1)


@dataclass(eq=False)
class UnitUpdate:
    """An update of some of a unit's tensors: `make` makes it, and returns how many parameters it has updated.

    `read` stands for the memory of their gradients. The update may begin when `offered` is set and the events `landed`
    are past: the gradients are there, and nothing reads the weights. `done` is set when it has ended. `first_use` tells
    when the next forward uses the unit: the lower, the sooner.
    """

    unit: OffloadUnit
    read: Sequence[GradientSlot | RingBlock]
    landed: Sequence[Event]
    first_use: float
    make: Callable[[], int] | None
    offered: Signal = field(init=False)
    done: Signal = field(init=False)

    def has_landed(self) -> bool:
        return all(event.query() for event in self.landed)

    def end(self) -> None:
        """Tells those who wait for it that it has ended, or will not be made."""
        self.done.set()
        for each in self.read:
            if isinstance(each, RingBlock):
                each.ended.set()


class _Queue:
    """The updates that a thread is to make: `coming`, and those of which it knows that their gradients have `landed`.

    The thread refers to this alone, and not to the worker: so a mode that was dropped without detach is freed.
    """

    def __init__(self, streams: Streams):
        self.coming: deque[UnitUpdate] = deque()
        self.landed: list[UnitUpdate] = []
        # What the thread has made.
        self.made = Counters()
        self.error: BaseException | None = None
        self._streams = streams
        self._changed = threading.Condition()
        self._closed = False
        self._thread: threading.Thread | None = None

    def put(self, update: UnitUpdate) -> None:
        """Queues an update, with the first of which the thread starts."""
        with self._changed:
            if self.error is not None:
                # As of those that were there when it failed.
                update.end()
                return
            if self._thread is None:
                thread = threading.Thread(target=self._work, name="host optimizer", daemon=True)
                thread.start()
                self._thread = thread
            self.coming.append(update)
            self._changed.notify_all()

    def close(self) -> None:
        """Ends the thread when it has made what was queued, or at once if it failed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # The garbage collector may call this on the thread itself.
        if self._thread not in (None, threading.current_thread()):
            self._thread.join()

    def _work(self) -> None:
        with self._streams.beside(f"worker {next(_numbers)}"):
            try:
                while (update := self._next()) is not None:
                    self._make(update)
                    # It refers to the mode, which may be dropped while this waits for the next.
                    del update
            except BaseException as error:
                self._fail(error)

    def _next(self) -> UnitUpdate | None:
        """Waits for the next update, of those that have landed the one that is used first. Returns None at the end."""
        with self._changed:
            while not self.coming and not self.landed:
                if self._closed:
                    return None
                self._changed.wait()
            # They land in the order of their offers. To query each of a hundred takes a while, so those behind one that
            # has not landed are not queried.
            while self.coming and self.coming[0].has_landed():
                self.landed.append(self.coming.popleft())
            if not self.landed:
                self.landed.append(self.coming.popleft())
            first = min(self.landed, key=lambda update: update.first_use)
            # Of those of one unit in the order of their offers: where steps follow at once, a parameter has several.
            return next(update for update in self.landed if update.unit is first.unit)

    def _make(self, update: UnitUpdate) -> None:
        streams = self._streams
        update.offered.wait()
        for event in update.landed:
            event.synchronize()
        for gradient in update.read:
            streams.reads(None, gradient, "update")
        streams.writes(None, update.unit.weights, "update")
        start = perf_counter()
        with profiled(f"update {update.unit.name}"):
            parameters = update.make()
        self.made += Counters(update_ms=(perf_counter() - start) * 1e3, updated_parameters=parameters)
        with self._changed:
            self.landed.remove(update)
            # It refers to gradients, whose memory is used again only when nobody else does.
            update.make = None
            update.end()

    def _fail(self, error: BaseException) -> None:
        # The error first: threads that are woken look for it.
        with self._changed:
            self.error = error
            for update in itertools.chain(self.coming, self.landed):
                update.end()
            self.coming.clear()
            self.landed.clear()


class UpdateWorker:
    """Makes the updates of one attached model's units, on a thread of its own.

    An error ends the thread, and is raised, with the thread's traceback, by every call that waits from then on.
    """

    def __init__(self, streams: Streams):
        self.wait_ms = 0.0
        self._streams = streams
        self._updates: dict[OffloadUnit, list[UnitUpdate]] = {}
        self._has_raised = False
        self._queue = _Queue(streams)
        # At exit, too: a process that ends would stop the thread inside an update, and abort.
        self._end_thread = weakref.finalize(self, self._queue.close)

    def offer(self, update: UnitUpdate) -> Signal:
        """Queues an update, behind those of its unit that were offered before. Returns what is set when it has ended.

        Raises the worker's error.
        """
        update.offered, update.done = self._streams.signal(), self._streams.signal()
        update.offered.set()
        self._raise_error()
        # First, because the system may refuse the thread: nobody waits for an update that is not queued.
        self._queue.put(update)
        self._updates.setdefault(update.unit, []).append(update)
        return update.done

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Tells whether updates of the unit are not done yet."""
        updates = self._updates.get(unit)
        if updates and all(update.done.is_set() for update in updates):
            self.wait(unit)
        return unit in self._updates

    def wait(self, unit: OffloadUnit) -> None:
        """Blocks the host until the unit's updates are done. Raises the worker's error."""
        start = perf_counter()
        for update in self._updates.get(unit, ()):
            update.done.wait()
        # Not before: an interrupt of the wait would hide updates that are under way from later waits.
        self._updates.pop(unit, None)
        self.wait_ms += (perf_counter() - start) * 1e3
        self._raise_error()

    def finish(self) -> None:
        """Blocks the host until all updates are done. Raises the worker's error, now and later."""
        for unit in list(self._updates):
            self.wait(unit)
        self._raise_error()

    def counters(self) -> Counters:
        """Counts the parameters updated, how long that took and how long the host waited for it."""
        return self._queue.made + Counters(update_wait_ms=self.wait_ms)

    def close(self) -> None:
        """Ends the thread when it has made the updates that were offered, or at once if it failed; raises nothing."""
        self._end_thread()
        for update in itertools.chain.from_iterable(self._updates.values()):
            update.done.wait()
        self._updates.clear()

    def raise_new_error(self) -> None:
        """Raises the thread's error if no call has raised it yet."""
        if not self._has_raised:
            self._raise_error()

    def _raise_error(self) -> None:
        if self._queue.error is not None:
            self._has_raised = True
            raise self._queue.error
