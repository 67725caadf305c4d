"""Before a program imports its libraries: whether they are there, and Ctrl-C while they are imported, for seconds.

An import may swallow KeyboardInterrupt, so that the program runs on, and an extension in C++ may abort at it. Until the
imports are done the signal therefore ends the process itself. This file needs the standard library alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from types import FrameType

# What every program imports first; requirements.txt brings all else with them.
LIBRARIES = ("torch", "hydra", "omegaconf")
# The exit status of a process that Ctrl-C ended.
INTERRUPTED = 130


def refuse_foreign_python() -> None:
    """Ends the process with one line if the libraries are not installed for the Python that runs it."""
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        sys.exit(
            f"error: {', '.join(missing)} {verb} not installed for {sys.executable}: put scripts/run.sh in front of the"
            f" command, or install: {sys.executable} -m pip install -r requirements.txt"
        )


def end_on_interrupt() -> None:
    """Makes Ctrl-C end the process at once, with one line, unless it is ignored, as in the background of a shell."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end)


def interrupt_as_usual() -> None:
    """Makes Ctrl-C raise KeyboardInterrupt again: the imports are done."""
    if signal.getsignal(signal.SIGINT) is _end:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@contextmanager
def interrupt_in_one_line() -> Iterator[None]:
    """Surrounds a program: KeyboardInterrupt unwinds the block, and ends the process with one line."""
    try:
        yield
    except KeyboardInterrupt:
        print("error: interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
