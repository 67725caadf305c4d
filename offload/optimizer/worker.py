"""Makes updates of units on a thread of the host, while the device computes the step.

The worker chooses, among the updates whose gradients have landed, those of the unit that the next forward needs first.
So the updates of a step are hidden behind its own backward and the next forward. They are exact: a unit is used after
its own updates, and waits for no others.
"""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter

from offload.streams.registry import Event, Signal, Streams, device_wait_ms
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

    def end(self) -> None:
        """Tells those who wait for it that it has ended, or will not be made."""
        self.done.set()
        for each in self.read:
            if isinstance(each, RingBlock):
                each.ended.set()


class UpdateWorker:
    """Makes the updates of one attached model's units on a thread of its own, which the first starts.

    An error ends the thread, and is raised, with the thread's traceback, by every call that waits from then on. The
    thread refers to the worker, and so to units only while they have updates left: a mode that was dropped without
    detach is freed.
    """

    def __init__(self, streams: Streams):
        self.wait_ms = 0.0
        self._streams = streams
        # The ends of updates that nobody has waited for, by the number of the unit.
        self._ends: dict[int, list[Signal]] = {}
        # The updates that the thread is to make, and those of which it knows that their gradients have landed.
        self._coming: deque[UnitUpdate] = deque()
        self._landed: list[UnitUpdate] = []
        self._made = Counters()
        self._error: BaseException | None = None
        self._has_raised = self._closed = False
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """True if updates are left, whether their gradients have landed or not."""
        return bool(self._coming or self._landed)

    def offer(self, update: UnitUpdate) -> Signal:
        """Queues an update, behind those of its unit that were offered before. Returns what is set when it has ended.

        Raises the worker's error.
        """
        update.offered, update.done = self._streams.signal(), self._streams.signal()
        update.offered.set()
        self._raise_error()
        with self._changed:
            if self._error is not None:
                # As of those that were there when it failed.
                update.end()
            else:
                if self._thread is None:
                    thread = threading.Thread(target=self._work, name="host optimizer", daemon=True)
                    # The system may refuse it: nobody waits for an update that is not queued.
                    thread.start()
                    self._thread = thread
                self._coming.append(update)
                self._changed.notify_all()
        self._ends.setdefault(update.unit.index, []).append(update.done)
        return update.done

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Tells whether updates of the unit are not done yet."""
        ends = self._ends.get(unit.index)
        if ends and all(done.is_set() for done in ends):
            self.wait(unit)
        return unit.index in self._ends

    def wait(self, unit: OffloadUnit) -> None:
        """Blocks the host until the unit's updates are done. Raises the worker's error."""
        self._wait(unit.index)

    def finish(self) -> None:
        """Blocks the host until all updates are done. Raises the worker's error, now and later."""
        for index in list(self._ends):
            self._wait(index)
        self._raise_error()

    def counters(self) -> Counters:
        """Counts the parameters updated, how long that took and how long the host waited for it."""
        return self._made + Counters(update_wait_ms=self.wait_ms)

    def close(self) -> None:
        """Ends the thread when it has made the updates that were offered, or at once if it failed; raises nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        # The garbage collector may call this on the thread itself.
        if self._thread is threading.current_thread():
            return
        if self._thread is not None:
            self._thread.join()
        for done in itertools.chain.from_iterable(self._ends.values()):
            done.wait()
        self._ends.clear()

    def raise_new_error(self) -> None:
        """Raises the thread's error if no call has raised it yet."""
        if not self._has_raised:
            self._raise_error()

    def _wait(self, index: int) -> None:
        ends = self._ends.get(index, ())
        blocks = not all(done.is_set() for done in ends)
        self.wait_ms += device_wait_ms(self._streams, lambda: [done.wait() for done in ends], blocks)
        # Not before: an interrupt of the wait would hide updates that are under way from later waits.
        self._ends.pop(index, None)
        self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._has_raised = True
            raise self._error

    # On the thread.

    def _work(self) -> None:
        with self._streams.beside(f"worker {next(_numbers)}"):
            try:
                while (update := self._next()) is not None:
                    self._make(update)
                    # It refers to the mode, which may be dropped while this waits for the next.
                    del update
            except BaseException as error:
                # The error first: threads that are woken look for it.
                with self._changed:
                    self._error = error
                    for left in itertools.chain(self._coming, self._landed):
                        left.end()
                    self._coming.clear()
                    self._landed.clear()

    def _next(self) -> UnitUpdate | None:
        """Waits for the next update, of those that have landed the one that is used first. Returns None at the end."""
        coming, landed = self._coming, self._landed
        with self._changed:
            while not self.is_busy:
                if self._closed:
                    return None
                self._changed.wait()
            # They land in the order of their offers. To query each of a hundred takes a while, so those behind one that
            # has not landed are not queried.
            while coming and all(event.query() for event in coming[0].landed):
                landed.append(coming.popleft())
            if not landed:
                landed.append(coming.popleft())
            first = min(landed, key=lambda update: update.first_use)
            # Of those of one unit in the order of their offers: where steps follow at once, a parameter has several.
            return next(update for update in landed if update.unit is first.unit)

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
        self._made += Counters(update_ms=(perf_counter() - start) * 1e3, updated_parameters=parameters)
        with self._changed:
            self._landed.remove(update)
            # It refers to gradients, whose memory is used again only when nobody else does.
            update.make = None
            update.end()
