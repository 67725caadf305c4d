"""What holds for all tests."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    # Started in the background, as by a CI runner, this process ignores Ctrl-C, under nohup the terminal's end, and so
    # would every one that a test starts to interrupt it.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
