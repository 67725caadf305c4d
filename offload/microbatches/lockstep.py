"""Functions that run side by side in one program order: each in a thread, one at a time, switching where they ask to.

A Python function cannot be left in the middle and taken up again, a thread can. So to send several microbatches
through the first layers of a model before any of them goes on (the order of GPipe, Huang et al. 2019), each runs in a
thread of its own and pauses where it enters the next layers.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import torch

from offload.runtime.registry import Streams


class Threads:
    """Threads that outlive the functions they run, because libraries cache by thread.

    cuDNN's plans for attention, for one: built anew for each microbatch of each step they cost 50 ms a time.
    """

    def __init__(self) -> None:
        self._pools: list[ThreadPoolExecutor] = []

    def run(self, index: int, function: Callable[[], None]) -> Future:
        """Starts `function` on thread number `index`, which must be idle."""
        while len(self._pools) <= index:
            self._pools.append(ThreadPoolExecutor(1, thread_name_prefix="lockstep"))
        return self._pools[index].submit(function)

    def close(self) -> None:
        """Ends the threads when they are idle."""
        for pool in self._pools:
            pool.shutdown()
        self._pools.clear()


class Lockstep:
    """Runs functions in turns; `pause`, called from inside them, says where one gives its turn to the next.

    Each function has the caller's autograd and autocast modes and streams, and random numbers of its own: the states
    of the generators change hands with the turns.
    """

    def __init__(self, functions: Sequence[Callable[[], object]], streams: Streams, threads: Threads):
        modes = _Modes(streams)
        self._workers = [_Worker(index, function, modes, threads) for index, function in enumerate(functions)]
        self._current: _Worker | None = None

    def run(self) -> list:
        """Runs all to their end and returns their results; raises what the first to fail raised.

        Who waits at the place where the others went last goes first, in the order of the functions; when nobody waits
        there any more, the next place in ascending order is taken, after the last the first again.
        """
        place, turn = -1, 0
        try:
            while waiting := [worker for worker in self._workers if not worker.ended]:
                if not any(worker.place == place for worker in waiting):
                    places = sorted({worker.place for worker in waiting})
                    place = next((ahead for ahead in places if ahead > place), places[0])
                    turn += 1
                worker = next(worker for worker in waiting if worker.place == place)
                self._resume(worker, turn)
                if worker.error is not None:
                    error, worker.error = worker.error, None
                    raise error
        finally:
            self._abort()
        return [worker.result for worker in self._workers]

    def pause(self, place: int) -> None:
        """Called by a function that is about to enter `place`: returns when it is its turn there."""
        if self._current is not None and self._current.place != place:
            self._current.pause(place)

    def turn_of(self, index: int, sequence_number: int) -> int:
        """The turn in which function `index` recorded the autograd node of that sequence number."""
        worker = self._workers[index]
        return worker.turns[max(bisect_right(worker.turn_starts, sequence_number) - 1, 0)]

    def _resume(self, worker: _Worker, turn: int) -> None:
        before, self._current = self._current, worker
        try:
            worker.take_turn(turn)
        finally:
            self._current = before

    def _abort(self) -> None:
        for worker in self._workers:
            worker.aborted = True
            if worker.running is not None and not worker.ended:
                self._resume(worker, 0)
            if worker.running is not None:
                worker.running.result()


class _Aborted(BaseException):
    """Unwinds a function whose turn will not come."""


class _Worker:
    """One function, its thread, its place and its turns. Sequence numbers of autograd count by thread."""

    def __init__(self, index: int, function: Callable[[], object], modes: _Modes, threads: Threads):
        self.running: Future | None = None
        self.place = -1
        self.result: object = None
        self.error: BaseException | None = None
        self.ended = self.aborted = False
        self.turns: list[int] = []
        self.turn_starts: list[int] = []
        self._function = function
        self._modes = modes
        self._index, self._threads = index, threads
        self._go, self._gave_up = threading.Semaphore(0), threading.Semaphore(0)

    def take_turn(self, turn: int) -> None:
        """Called by the owner: runs the function on to its next pause or its end."""
        self.turns.append(turn)
        if self.running is not None:
            self._go.release()
        else:
            self.running = self._threads.run(self._index, self._run)
        self._gave_up.acquire()

    def pause(self, place: int) -> None:
        self.place = place
        random_state = self._modes.random_state()
        self._gave_up.release()
        self._go.acquire()
        if self.aborted:
            raise _Aborted
        self._modes.set_random_state(random_state)
        self.turn_starts.append(torch._C._autograd._get_sequence_nr())

    def _run(self) -> None:
        try:
            with self._modes.here():
                self.turn_starts.append(torch._C._autograd._get_sequence_nr())
                self.result = self._function()
        except _Aborted:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._gave_up.release()


class _Modes:
    """What torch keeps by thread, as the caller has it: autograd and autocast modes, streams and device."""

    def __init__(self, streams: Streams):
        self._streams = streams
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", streams.device.type))
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._queueing = streams.as_here()

    def here(self) -> ExitStack:
        """The modes, for the thread that opens the context."""
        stack = ExitStack()
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, enabled, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self._cache))
        stack.enter_context(self._queueing())
        return stack

    def random_state(self) -> tuple[torch.Tensor, ...]:
        states = [torch.get_rng_state()]
        if self._streams.device.type == "cuda":
            states.append(torch.cuda.get_rng_state(self._streams.device))
        return tuple(states)

    def set_random_state(self, states: tuple[torch.Tensor, ...]) -> None:
        torch.set_rng_state(states[0])
        for state in states[1:]:
            torch.cuda.set_rng_state(state, self._streams.device)
