"""The console of a run may fail: a lost terminal or pipe, or a full disk behind it, does not end the run."""

import io
import os
import select
import sys
from contextlib import suppress


class _Console(io.FileIO):
    """Writes to a descriptor. If that fails, /dev/null replaces the descriptor for all who share it."""

    def write(self, data: bytes | memoryview) -> int:
        try:
            while (count := super().write(data)) is None:
                # It is full, and another program has made it non-blocking.
                select.select((), (self,), ())
            return count
        except OSError:
            with open(os.devnull, "wb") as null:
                os.dup2(null.fileno(), self.fileno())
            return memoryview(data).nbytes


def tolerate_failures() -> None:
    """Lets this process outlive its console: output that can no longer be written is dropped.

    Streams that a test has put in place of stdout and stderr are left as they are.
    """
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        stream = getattr(sys, name)
        # A stream of a test may have no descriptor, and one that was closed is None.
        with suppress(OSError, AttributeError):
            if stream.fileno() == descriptor:
                console = io.BufferedWriter(_Console(descriptor, "w", closefd=False))
                # Python's own stream writes at once under `python -u`; this one then writes each line at once.
                lines = stream.line_buffering or stream.write_through
                # A character that the console cannot show must not end the run either.
                text = io.TextIOWrapper(console, stream.encoding, "backslashreplace", line_buffering=lines)
                setattr(sys, name, text)
