"""Requests to stop: a run that can save itself finishes its step first; a job of a sweep ends with the sweep."""

import ctypes
import logging
import math
import os
import signal
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# Schedulers and `timeout` signal a process and its group, so one request arrives more than once.
SAME_REQUEST_S = 2.0
# Less training than this is as quickly repeated as saved.
WORTH_SAVING_S = 60.0
# In the environment of a sweep's jobs: the number of the sweep's process.
PARENT_VARIABLE = "OFFLOAD_SWEEP_PROCESS"
# The option of prctl(2).
_PR_SET_PDEATHSIG = 1

Handler = Callable[[int, FrameType | None], None]


class Interruption:
    """A signal handler that raises KeyboardInterrupt, and remembers that it did, because libraries may swallow it."""

    def __init__(self) -> None:
        self.asked = False
        self._once = once_per_request(signal.default_int_handler)

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        handler = signal.default_int_handler if number == signal.SIGINT else self._once
        handler(number, frame)

    def raise_again(self) -> None:
        """Raises KeyboardInterrupt if a signal raised it before: the run still goes on, so something swallowed it."""
        if self.asked:
            raise KeyboardInterrupt

    def install(self) -> list[signal.Signals]:
        """Handles the SIGNALS that are not ignored, and returns them."""
        numbers = signals_not_ignored()
        for number in numbers:
            signal.signal(number, self)
        return numbers


class StopRequest:
    """While open, notes a Ctrl-C, SIGTERM or SIGHUP; a second one raises KeyboardInterrupt.

    Signals within SAME_REQUEST_S seconds count as one. Signals that are ignored, as SIGHUP under nohup, stay ignored.
    In the first `after_s` seconds the first signal raises KeyboardInterrupt at once; with infinity handlers stay as
    they were.
    """

    def __init__(self, after_s: float):
        self.signal: str | None = None
        """The name of the signal that arrived."""
        self._after_s = after_s
        self._opened_s = math.inf
        self._interruption = Interruption()
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> Self:
        """Raises KeyboardInterrupt if a signal asked for it before and something swallowed it."""
        for number in SIGNALS:
            if isinstance(handler := signal.getsignal(number), Interruption):
                self._interruption = handler
        self.raise_again()
        if self._after_s < math.inf:
            self._opened_s = time.monotonic()
            handler = once_per_request(self._note)
            self._before = {number: signal.signal(number, handler) for number in signals_not_ignored()}
        return self

    def raise_again(self) -> None:
        """Raises KeyboardInterrupt if a signal was to end the run at once, and something swallowed it."""
        self._interruption.raise_again()

    def settle(self) -> None:
        """Ignores signals until the process ends: the run is complete or saved, and must not end as a failure."""
        if self.saves():
            for number in SIGNALS:
                signal.signal(number, signal.SIG_IGN)
            self._before.clear()

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None or not self.saves():
            self._interruption(number, frame)
            return
        self.signal = signal.Signals(number).name
        logger.warning("%s: the run ends when this step is done and saved; once more ends it at once", self.signal)

    def saves(self) -> bool:
        """Tells whether a signal that arrives now would save the run, and not end it at once."""
        return time.monotonic() - self._opened_s >= self._after_s


def signals_not_ignored() -> list[signal.Signals]:
    """Returns the SIGNALS that are not ignored, as nohup ignores SIGHUP, and `&` in a shell may ignore Ctrl-C."""
    return [number for number in SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]


def once_per_request(handler: Handler) -> Handler:
    """Returns a signal handler that calls `handler` only for the first signal of each request."""
    last = -math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= SAME_REQUEST_S:
            last = now
            handler(number, frame)

    return handle


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Makes Linux send the signal `number` to this job when its sweep's process ends, so that the job saves itself.

    It does nothing in a run that is no job of a sweep, and on other systems.
    """
    parent = os.environ.pop(PARENT_VARIABLE, None)
    if parent is None:
        return
    # A scheduler may send it to all processes of a job before the job's time is over. It would end this one unsaved;
    # the parent takes it, and sends SIGTERM.
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return
    prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)
    # It may have ended before.
    if os.getppid() != int(parent):
        os.kill(os.getpid(), number)
