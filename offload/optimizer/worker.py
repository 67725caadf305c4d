"""Updates units on a thread of the host, while the device computes the step.

The worker chooses among the gradients that have landed: one whose memory backward waits for, or else those of the unit
that the next forward needs first. So the updates of a step are hidden behind its own backward and the next forward.
They are exact: a unit is used after its own updates, and waits for no others.
"""

from __future__ import annotations

import atexit
import itertools
import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from time import perf_counter

from offload.optimizer.adamw import HostAdamW
from offload.optimizer.claims import Claim
from offload.optimizer.speculation import Decision, SpeculativeUpdates, Trial
from offload.streams.counters import Counters
from offload.streams.registry import Event, Signal, Streams
from offload.streams.transfer import profiled
from offload.weights.gradients.ring import RingBlock
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor

# A thread without updates for so long ends, and the next offer starts another. So nothing refers to a mode that was
# dropped without detach.
IDLE_S = 1.0


@dataclass(eq=False)
class _UnitUpdate:
    """An update of some of a unit's tensors. `read` stands for the memory of their gradients.

    It may begin when `offered` is set and the events `landed` are past: the gradients are there, and nothing reads the
    weights. `done` is set when it has ended.
    """

    unit: OffloadUnit
    read: list[UnitTensor] | list[RingBlock]
    claims: list[Claim]
    scale: float
    first_use: float
    landed: list[Event]
    offered: Signal
    done: Signal
    # An update whose scale is not known yet makes trials, which the decision keeps, or leaves to be undone.
    is_undecided: bool = False
    makes_trials: bool = False
    trials: list[Trial] = field(default_factory=list)
    undo: list[Trial] = field(default_factory=list)

    def has_landed(self) -> bool:
        return all(event.query() for event in self.landed)

    @property
    def rank(self) -> tuple[bool, float]:
        """The lower, the sooner it is to be made."""
        return not any(isinstance(each, RingBlock) and each.is_wanted for each in self.read), self.first_use

    @property
    def is_over(self) -> bool:
        return self.done.is_set() and not self.is_undecided


class UpdateWorker:
    """Makes the updates of one attached model's units by `optimizer`, on a thread of its own.

    `first_use` tells when the next forward uses a unit: the lower, the sooner. `speculative` makes the updates of which
    `decide` tells later whether they count. An error ends the thread, and is raised, with the thread's traceback, by
    every call that waits from then on.
    """

    def __init__(
        self,
        optimizer: HostAdamW,
        streams: Streams,
        first_use: Callable[[OffloadUnit], float],
        speculative: SpeculativeUpdates | None = None,
    ):
        self.host_ms = 0.0
        self.wait_ms = 0.0
        self.parameters = 0
        self._optimizer = optimizer
        self._streams = streams
        self._first_use = first_use
        self._speculative = speculative
        self._undecided: list[_UnitUpdate] = []
        # What the thread makes now, and the decision on it that came meanwhile.
        self._current: _UnitUpdate | None = None
        self._decision: Decision | None = None
        self._updates: dict[OffloadUnit, list[_UnitUpdate]] = {}
        self._coming: deque[_UnitUpdate] = deque()
        self._landed: list[_UnitUpdate] = []
        self._changed = threading.Condition()
        self._closed = False
        self._error: BaseException | None = None
        self._has_raised = False
        self._thread: threading.Thread | None = None
        self._threads = 0
        self._ended: Signal | None = None

    def offer(
        self,
        unit: OffloadUnit,
        tensors: Iterable[UnitTensor],
        scale: float = 1.0,
        after: Iterable[Event] = (),
        released: RingBlock | None = None,
        is_undecided: bool = False,
    ) -> Signal | None:
        """Queues the update of these `tensors` of the unit, whose gradients are final and on their way to the host.

        It begins when they have landed and the events `after` are past. Gradients count `scale` times, or where that
        `is_undecided` as `decide` tells. Tensors without a gradient, or offered in this step before, are left out.
        `released` has the gradient of a single tensor that has none of its own. Returns what is set when the update has
        ended; None where there is none.
        """
        tensors = list(tensors)
        gradients = {} if released is None else {tensors[0].host: released.tensor}
        claims = self._optimizer.claim((tensor.host for tensor in tensors), gradients)
        if not claims:
            return None
        landed = [tensor.landed for tensor in tensors if tensor.landed is not None]
        landed += after
        signals = self._streams.signal(), self._streams.signal()
        read = tensors if released is None else [released]
        update = _UnitUpdate(unit, read, claims, scale, self._first_use(unit), landed, *signals, is_undecided)
        update.offered.set()
        with self._changed:
            self._raise_error()
            self._start()
            self._updates.setdefault(unit, []).append(update)
            self._coming.append(update)
            if is_undecided:
                self._undecided.append(update)
            self._changed.notify_all()
        return update.done

    @property
    def undecided_units(self) -> list[OffloadUnit]:
        """The units with updates on which there is no decision yet."""
        return list(dict.fromkeys(update.unit for update in self._undecided))

    @property
    def undecided_claims(self) -> list[Claim]:
        """The claims of the updates on which there is no decision yet."""
        return [claim for update in self._undecided for claim in update.claims]

    def decide(self, decision: Decision) -> None:
        """Decides on the updates that were offered as undecided: trials are kept, or undone and made anew.

        What is left to do is queued, of units that the next forward uses first before others.
        """
        with self._changed:
            self._raise_error()
            undecided, self._undecided = self._undecided, []
            for update in undecided:
                update.is_undecided = False
                if update is self._current:
                    self._decision = decision
                elif self._settle(update, decision) and update.done.is_set():
                    update.offered, update.done = self._streams.signal(), self._streams.signal()
                    update.offered.set()
                    self._landed.append(update)
            if self._landed:
                self._start()
                self._changed.notify_all()

    def _settle(self, update: _UnitUpdate, decision: Decision) -> bool:
        """Turns an update of trials into what is left to do. Returns True if there is anything."""
        claims = [decision.claims[p] for claim in update.claims if (p := claim.parameter) in decision.claims]
        kept = [trial for trial in update.trials if decision.keeps(trial)]
        parameters = {trial.claim.parameter for trial in kept}
        update.undo = [trial for trial in update.trials if trial.claim.parameter not in parameters]
        update.claims = [claim for claim in claims if claim.parameter not in parameters]
        update.scale = decision.scale
        # They refer to gradients, as claims do.
        update.trials.clear()
        self._speculative.forget(kept)
        self._speculative.count_undone(update.undo)
        return bool(update.undo or update.claims)

    def is_pending(self, unit: OffloadUnit) -> bool:
        """Tells whether updates of the unit are not done yet, or not decided on."""
        updates = self._updates.get(unit)
        if updates and all(update.is_over for update in updates):
            self.wait(unit)
        return unit in self._updates

    def is_undecided(self, unit: OffloadUnit) -> bool:
        """Tells whether there are updates of the unit on which there is no decision yet."""
        return any(update.is_undecided for update in self._updates.get(unit, ()))

    def wait(self, unit: OffloadUnit) -> None:
        """Blocks the host until those of the unit's updates that are decided on are done. Raises the worker's error."""
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
        """Counts the updates made, how long they took and how long the host waited for them."""
        made = Counters(update_ms=self.host_ms, update_wait_ms=self.wait_ms, updated_parameters=self.parameters)
        return made if self._speculative is None else made + self._speculative.counters()

    def close(self) -> None:
        """Ends the thread when it has made the updates that were offered, or at once if it failed; raises nothing."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None:
            thread.join()
            self._forget_thread()
        for update in itertools.chain.from_iterable(self._updates.values()):
            update.done.wait()
        self._updates.clear()

    def _start(self) -> None:
        if self._thread is not None:
            return
        self._threads += 1
        # Each has a clock of its own in the stream checker.
        name = f"worker {self._threads}"
        before, self._ended = self._ended, self._streams.signal()
        arguments = (name, before, self._ended)
        thread = threading.Thread(target=self._work, args=arguments, name="host optimizer", daemon=True)
        thread.start()
        self._thread = thread
        # A process that ends without `close` would stop the thread inside an update, and abort.
        atexit.register(self.close)

    def raise_new_error(self) -> None:
        """Raises the thread's error if no call has raised it yet."""
        if not self._has_raised:
            self._raise_error()

    def _raise_error(self) -> None:
        if self._error is not None:
            self._has_raised = True
            raise self._error

    def _forget_thread(self) -> None:
        self._thread = None
        atexit.unregister(self.close)

    def _work(self, name: str, before: Signal | None, ended: Signal) -> None:
        with self._streams.beside(name):
            try:
                if before is not None:
                    before.wait()
                while (update := self._next()) is not None:
                    self._make(update)
                    self._end(update)
            except BaseException as error:
                self._fail(error)
            finally:
                ended.set()

    def _next(self) -> _UnitUpdate | None:
        """Waits for the next update: of those that have landed, the one of lowest rank. Returns None at the end."""
        with self._changed:
            while not self._coming and not self._landed:
                if self._closed:
                    return None
                if not self._changed.wait(IDLE_S) and not (self._coming or self._landed or self._closed):
                    self._forget_thread()
                    return None
            # They land in the order of their offers. To query each of a hundred takes a while, so those behind one that
            # has not landed are not queried.
            while self._coming and self._coming[0].has_landed():
                self._landed.append(self._coming.popleft())
            if not self._landed:
                self._landed.append(self._coming.popleft())
            first = min(self._landed, key=lambda update: update.rank)
            # Of those of one unit in the order of their offers: where steps follow at once, a parameter has several.
            self._current = next(update for update in self._landed if update.unit is first.unit)
            self._current.makes_trials = self._current.is_undecided
            return self._current

    def _make(self, update: _UnitUpdate) -> None:
        streams = self._streams
        update.offered.wait()
        for event in update.landed:
            event.synchronize()
        for gradient in update.read:
            streams.reads(None, gradient, "update")
        streams.writes(None, update.unit.weights, "update")
        with profiled(f"update {update.unit.name}"):
            if update.makes_trials:
                start, claims = perf_counter(), update.claims
                update.trials = self._speculative.make(claims)
                claims = [trial.claim for trial in update.trials]
            else:
                if update.undo:
                    self._speculative.undo(update.undo)
                    self._speculative.forget(update.undo)
                start, claims = perf_counter(), update.claims
                self._optimizer.apply(claims, update.scale)
        self.host_ms += (perf_counter() - start) * 1e3
        self.parameters += sum(claim.parameter.numel() for claim in claims)

    def _end(self, update: _UnitUpdate) -> None:
        with self._changed:
            self._current, decision, self._decision = None, self._decision, None
            if decision is not None and self._settle(update, decision):
                # It is among those that have landed still.
                return
            self._landed.remove(update)
            if not update.is_undecided:
                # They refer to gradients, whose memory is used again only when nobody else does.
                update.claims.clear()
                update.undo.clear()
            update.done.set()

    def _fail(self, error: BaseException) -> None:
        # The error first: threads that are woken look for it.
        with self._changed:
            self._error = error
            for update in itertools.chain(self._coming, self._landed):
                update.done.set()
            self._coming.clear()
            self._landed.clear()
            self._undecided.clear()
        # The thread ends, and is in no update.
        atexit.unregister(self.close)
