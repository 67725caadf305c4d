"""Ends a test that hangs, such as one that waits for a pipe."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class TooLongError(BaseException):
    """No code handles it."""


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raises TooLongError in the block after `seconds`. It cannot end a call that repeats itself after a signal."""

    def late(*_: object) -> None:
        raise TooLongError(f"it took more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
