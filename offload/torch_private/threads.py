"""The threads of forwards: the number of the microbatch that runs in one, and who may run a forward at all.

Several microbatches run side by side in threads of their own, by turns. All other forwards of a model under a mode take
turns too, because they share its slots and its record of the step.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from offload.torch_private.torch_internals import is_in_backward


class SideBySideError(RuntimeError):
    """Raised for what code does with `what` while microbatches run side by side, and each would see it of others.

    The mode runs them one after another from then on.
    """

    def __init__(self, what: str):
        super().__init__(
            f"{what} in a loss while several microbatches run side by side: one after another they would compute"
            " something else. From now on this mode runs them one after another: clear the gradients and run the step"
            " again"
        )


class _Running(threading.local):
    number: int | None = None


_running = _Running()


def running_microbatch() -> int | None:
    """Returns the number of the microbatch whose forward runs in this thread; None where there are no others."""
    return _running.number


@contextmanager
def running(number: int) -> Iterator[None]:
    """Notes that this thread runs the forward of microbatch `number` inside the block."""
    before, _running.number = _running.number, number
    try:
        yield
    finally:
        _running.number = before


class OneThread:
    """Refuses forwards of a second thread while one runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Surrounds the outermost forward of a thread. Raises RuntimeError while another runs one.

        Microbatches side by side take turns by themselves. A recompute may run in a thread of autograd, while the
        forward that has called backward waits.
        """
        if running_microbatch() is not None or is_in_backward():
            yield
            return
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "two threads run forwards of one model at the same time, which an offload mode cannot keep apart: let"
                " them take turns (threading.Lock), or give each a copy of the model"
            )
        try:
            yield
        finally:
            self._lock.release()
