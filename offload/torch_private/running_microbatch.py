"""The number of the microbatch that runs in this thread, where several run side by side."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
