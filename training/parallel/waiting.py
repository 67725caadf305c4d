"""Waits on a thread of its own, so that Ctrl-C works meanwhile: inside torch's waits Python handles no signal."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue

# Seconds after which a wait looks for signals: one that comes as the wait begins, or on another thread, ends no wait.
_LOOKS_AT_SIGNALS = 0.2


class Waiter:
    """Makes calls that block, one at a time."""

    def __init__(self):
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._outcomes: SimpleQueue[BaseException | None] = SimpleQueue()
        # The end of the process does not wait for it.
        threading.Thread(target=self._work, daemon=True).start()

    def wait(self, call: Callable[[], object]) -> None:
        """Returns when `call` does, and raises what it raises.

        A signal's handler runs meanwhile, and may raise; then `call` still runs, and no other may be made.
        """
        self._calls.put(call)
        while True:
            try:
                error = self._outcomes.get(timeout=_LOOKS_AT_SIGNALS)
                break
            except Empty:
                continue
        if error is not None:
            raise error

    def close(self) -> None:
        """Ends the thread, once its call has returned."""
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            error = None
            try:
                call()
            except BaseException as raised:
                error = raised
            # Before the waiter goes on: where the process ends meanwhile, it aborts as this thread frees torch's work.
            del call
            self._outcomes.put(error)
