"""Ends a job of a sweep with the sweep's process, even one that was killed and could pass no signal on."""

from __future__ import annotations

import ctypes
import os
import signal

PARENT_VARIABLE = "OFFLOAD_SWEEP_PROCESS"
"""the number of the sweep's process, in the environment of its jobs"""

# The option of prctl(2).
_PR_SET_PDEATHSIG = 1


def end_with_parent(number: signal.Signals = signal.SIGTERM) -> None:
    """Makes the system send a job of a sweep SIGTERM when the sweep's process ends, so that the job saves.

    A job is a process whose environment has the number of its parent; `number` is the signal that is sent. Only Linux
    does that; elsewhere, and where the environment has no such number, nothing happens.
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
