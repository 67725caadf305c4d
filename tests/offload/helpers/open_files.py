"""The files that this process has open, for tests of those that are left."""

import os
from contextlib import suppress


def open_files() -> set[tuple[str, str]]:
    """Returns the number of each open file, with what it is.

    What a test leaves is what is here and was not before it. The number of files may fall meanwhile: what earlier tests
    have dropped is closed when the collector runs.
    """
    found = set()
    for number in os.listdir("/proc/self/fd"):
        # That of the listing itself is closed by now.
        with suppress(FileNotFoundError):
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
    return found
