"""Lockstep: functions that take turns, each in a thread of its own, one thread at a time.

A Python function cannot be stopped in the middle and continued later; a thread can. To send several microbatches
through the first layers of a model before the next layers (the order of GPipe, Huang et al. 2019), each microbatch runs
in a thread, and pauses where it enters the next layers. One thread runs at a time, so there is one program order.
"""

from __future__ import annotations

import contextvars
import threading
from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial

import torch
from torch.autograd.graph import saved_tensors_hooks

from offload.streams.registry import Streams
from offload.torch_private.module_contexts import SideBySideError, running
from offload.torch_private.recomputed_blocks import RandomState
from offload.torch_private.saved_tensor_hooks import active_hooks
from offload.torch_private.torch_internals import next_sequence_number


class Threads:
    """Threads that live longer than the functions they run, because libraries keep caches for each thread.

    One of them has cuDNN's plans for attention: building them for each microbatch of each step takes 50 ms each time.
    """

    def __init__(self) -> None:
        self._pools: list[ThreadPoolExecutor] = []

    def run(self, index: int, function: Callable[[], None]) -> Future:
        """Starts `function` in thread number `index`, which must be idle."""
        while len(self._pools) <= index:
            self._pools.append(ThreadPoolExecutor(1, thread_name_prefix="lockstep"))
        return self._pools[index].submit(function)

    def close(self) -> None:
        """Waits until the threads are idle, and ends them."""
        for pool in self._pools:
            pool.shutdown()
        self._pools.clear()


class Lockstep:
    """Runs functions in turns. A function calls `pause` to end its turn.

    Each has the caller's autograd and autocast modes and streams, and random numbers of its own: the state of the
    generators is kept from turn to turn. The caller finds the state that the last function has left.
    """

    def __init__(
        self,
        functions: Sequence[Callable[[], object]],
        streams: Streams,
        threads: Threads,
        around_turn: Callable[[int], AbstractContextManager] = lambda index: nullcontext(),
    ):
        """Takes `around_turn`, which makes a context for each turn of function `index`; the calling thread opens it."""
        state = _ThreadState(streams)
        self._around_turn = around_turn
        self._workers = [_Worker(index, function, state, threads) for index, function in enumerate(functions)]
        self._current: _Worker | None = None

    def run(self) -> list:
        """Runs all functions to their end. Returns their results in order; raises the exception of the first to fail.

        At each place the functions that wait there run one after the other, in their order. When no function waits at
        the current place any more, the next place in ascending order is taken, and after the last the first again.
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
        # Those that the caller would find if the functions had run one after another.
        self._workers[-1].random_state.restore()
        return [worker.result for worker in self._workers]

    def pause(self, place: int) -> bool:
        """Called by a function before it enters `place`. Returns when it is the function's turn there.

        Returns True if others may have run meanwhile.
        """
        if self._current is None or self._current.place == place:
            return False
        self._current.pause(place)
        return True

    def turn_of(self, index: int, sequence_number: int) -> int:
        """Returns the turn in which function `index` recorded the autograd node of that sequence number."""
        worker = self._workers[index]
        return worker.turns[max(bisect_right(worker.turn_starts, sequence_number) - 1, 0)]

    @property
    def all_took_one_way(self) -> bool:
        """True if all functions had their turns at the same places."""
        return all(worker.turns == self._workers[0].turns for worker in self._workers)

    def _resume(self, worker: _Worker, turn: int) -> None:
        previous, self._current = self._current, worker
        # Each turn casts the weights for itself, as each microbatch does that runs alone. With shared casts, autograd
        # would add the gradients of several in the lower precision.
        torch.clear_autocast_cache()
        try:
            with self._around_turn(worker.index):
                worker.take_turn(turn)
        finally:
            self._current = previous

    def _abort(self) -> None:
        for worker in self._workers:
            worker.aborted = True
            if worker.running is not None and not worker.ended:
                # It ends by another error already.
                with suppress(SideBySideError):
                    self._resume(worker, 0)
            if worker.running is not None:
                worker.running.result()


class _Aborted(BaseException):
    """Raised inside a function that will not get another turn, to end it."""


class _Worker:
    """One function with its thread, its place and its turns.

    `turn_starts` has the sequence number of autograd at the begin of each turn; these numbers count in each thread.
    """

    def __init__(self, index: int, function: Callable[[], object], state: _ThreadState, threads: Threads):
        self.running: Future | None = None
        # Each has its own values of context variables, those of the caller at first.
        self._context = contextvars.copy_context()
        self.place = -1
        self.result: object = None
        self.error: BaseException | None = None
        self.ended = self.aborted = False
        self.turns: list[int] = []
        self.turn_starts: list[int] = []
        # At the end of the function.
        self.random_state: RandomState | None = None
        self._function = function
        self._state = state
        self.index, self._threads = index, threads
        self._go, self._gave_up = threading.Semaphore(0), threading.Semaphore(0)

    def take_turn(self, turn: int) -> None:
        """Runs the function until its next pause or its end. Called by the thread that owns the lockstep."""
        self.turns.append(turn)
        if self.running is not None:
            self._go.release()
        else:
            self.running = self._threads.run(self.index, partial(self._context.run, self._run))
        self._gave_up.acquire()

    def pause(self, place: int) -> None:
        self.place = place
        random_state = self._state.random_state()
        self._gave_up.release()
        self._go.acquire()
        if self.aborted:
            raise _Aborted
        random_state.restore()
        self.turn_starts.append(next_sequence_number())

    def _run(self) -> None:
        try:
            with self._state.as_in_caller(), running(self.index):
                self.turn_starts.append(next_sequence_number())
                self.result = self._function()
                self.random_state = self._state.random_state()
        except _Aborted:
            pass
        except BaseException as error:
            self.error = error
        finally:
            self.ended = True
            self._gave_up.release()


class _ThreadState:
    """The state that torch keeps for each thread, as the caller has it: autograd with its hooks, autocast, streams.

    So is the number of cores: sums over another number round otherwise, and a thread that begins while the host
    optimizer computes takes that one's.
    """

    def __init__(self, streams: Streams):
        self._streams = streams
        self._grad = torch.is_grad_enabled()
        self._autocast = [
            (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
            for kind in dict.fromkeys(("cpu", streams.device.type))
            if torch.amp.is_autocast_available(kind)
        ]
        self._cache = torch.is_autocast_cache_enabled()
        self._default_device = torch.get_default_device()
        self._cores = torch.get_num_threads()
        self._hooks = active_hooks()
        self._streams_context = streams.thread_context()

    def as_in_caller(self) -> ExitStack:
        """Returns a context in which the thread that opens it has the caller's state."""
        stack = ExitStack()
        if torch.get_num_threads() != self._cores:
            torch.set_num_threads(self._cores)
        stack.enter_context(torch.set_grad_enabled(self._grad))
        for kind, enabled, dtype in self._autocast:
            stack.enter_context(torch.autocast(kind, enabled=enabled, dtype=dtype, cache_enabled=self._cache))
        stack.enter_context(self._streams_context())
        if self._default_device.type != "cpu":
            stack.enter_context(self._default_device)
        if self._hooks is not None:
            stack.enter_context(saved_tensors_hooks(*self._hooks))
        return stack

    def random_state(self) -> RandomState:
        return RandomState.of(self._streams.device)
