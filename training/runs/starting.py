"""Ctrl-C while a program imports its libraries, which takes seconds. Import this file before them.

An import may swallow KeyboardInterrupt, so that the program runs on, and an extension in C++ may abort at it. Until the
imports are done the signal therefore ends the process itself.
"""

from __future__ import annotations

import os
import signal
from types import FrameType

_MESSAGE = b"error: interrupted\n"
_INTERRUPTED = 130


def end_on_interrupt() -> None:
    """Makes Ctrl-C end the process at once, with one line, unless it is ignored, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interrupt_as_usual() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again: the imports are done."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, _MESSAGE)
    finally:
        os._exit(_INTERRUPTED)
