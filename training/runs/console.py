"""The console of a run may fail, as wandb may: a lost terminal, pipe or disk behind it does not end the run."""

import io
import logging
import os
import select
import sys
from contextlib import suppress
from typing import TextIO

from training.runs.files import LOG_FILE

logger = logging.getLogger(__name__)

STREAMS = {"stdout": 1, "stderr": 2}
"""the descriptor of each stream"""


class _Console(io.FileIO):
    """Writes to a descriptor. If that fails, `null` replaces the descriptor for all who share it; no error shows."""

    def __init__(self, descriptor: int, null: int):
        super().__init__(descriptor, "w", closefd=False)
        self.failure: str | None = None
        """Why it was lost, until that is in the log."""
        self._null = null

    def write(self, data: bytes | memoryview) -> int:
        try:
            while (count := super().write(data)) is None:
                # It is full, and another program has made it non-blocking.
                select.select((), (self,), ())
            return count
        except OSError as error:
            os.dup2(self._null, self.fileno())
            self.failure = error.strerror
            return memoryview(data).nbytes


_consoles: dict[str, _Console] = {}


def tolerate_failures() -> None:
    """Lets this process outlive its console: output that can no longer be written is dropped.

    Streams that a test has put in place of stdout and stderr are left as they are.
    """
    while (null := os.open(os.devnull, os.O_RDWR)) <= max(STREAMS.values()):
        # The number of a closed stream. The next file to be opened would get it, and what libraries in C print.
        os.set_inheritable(null, True)
    for name, descriptor in STREAMS.items():
        stream: TextIO | None = getattr(sys, name)
        if stream is None:
            # The descriptor may belong to a file that was opened since.
            setattr(sys, name, _text(_Console(null, null), "utf-8", line_buffering=True))
            continue
        # A stream of a test may have no descriptor.
        with suppress(OSError):
            if stream.fileno() == descriptor:
                console = _consoles[name] = _Console(descriptor, null)
                # Python's own stream writes at once under `python -u`; this one then writes each line at once.
                lines = stream.line_buffering or stream.write_through
                setattr(sys, name, _text(console, stream.encoding, line_buffering=lines))


def note_failures() -> None:
    """Logs which streams were lost since the last call."""
    for name, console in _consoles.items():
        failure, console.failure = console.failure, None
        if failure is not None:
            logger.warning("%s is lost (%s): the run continues, and its messages are in %s", name, failure, LOG_FILE)


def _text(console: _Console, encoding: str, line_buffering: bool) -> io.TextIOWrapper:
    # A character that the console cannot show must not end the run either.
    return io.TextIOWrapper(io.BufferedWriter(console), encoding, "backslashreplace", line_buffering=line_buffering)
