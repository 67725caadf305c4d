"""Requests to stop: a run that can save itself finishes its step first."""

from __future__ import annotations

import logging
import signal
from types import FrameType

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class StopRequest:
    """While open, Ctrl-C and SIGTERM are remembered; a second one ends the run at once, as KeyboardInterrupt.

    Args:
        enabled: False changes nothing: the first signal ends the run, as it does outside.
    """

    def __init__(self, enabled: bool):
        self.signal: str | None = None
        """The name of the signal that came."""
        self._enabled = enabled
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if self._enabled:
            self._before = {number: signal.signal(number, self._note) for number in SIGNALS}
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            signal.default_int_handler(number, frame)
        self.signal = signal.Signals(number).name
        logger.warning("%s: the run ends when this step is done and saved; once more ends it at once", self.signal)
