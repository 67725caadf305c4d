"""Before a program imports its libraries: whether they are there, Ctrl-C while they are imported, torch's allocator.

An import may swallow KeyboardInterrupt, so that the program runs on, and an extension in C++ may abort at it. Until the
imports are done the signal therefore ends the process itself. This file needs the standard library alone.
"""

import atexit
import gc
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
ALLOCATOR_SETTING = "expandable_segments:True"
ALLOCATOR_VARIABLE = "PYTORCH_ALLOC_CONF"
# The name of older releases, and of builds for AMD's GPUs.
OLDER_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
ALLOCATOR_ADVICE = f"{ALLOCATOR_VARIABLE}={ALLOCATOR_SETTING} before the command joins free pieces of memory"


def refuse_foreign_python() -> None:
    """Ends the process with one line on native Windows, and if the libraries are not installed for this Python."""
    if sys.platform == "win32":
        # Which has no fcntl, for the locks of runs.
        sys.exit("error: native Windows is not supported: run it on Linux, or in WSL (wsl --install)")
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


def end_soon() -> None:
    """Skips the garbage collections at the end of the process, which take two seconds with torch.

    Call it before others register functions with atexit: the first one runs last.
    """
    atexit.register(gc.freeze)


def expand_segments() -> None:
    """Makes segments of torch's allocator expandable, here and in child processes, unless the user has configured it.

    In fixed segments, tensors of many sizes leave gaps that no later tensor fits into. Call it before torch is
    imported.
    """
    if not any(os.environ.get(name) for name in (ALLOCATOR_VARIABLE, *OLDER_VARIABLES)):
        os.environ[ALLOCATOR_VARIABLE] = ALLOCATOR_SETTING


def segments_expand() -> bool:
    """Tells whether the allocator is configured so."""
    return any(ALLOCATOR_SETTING in os.environ.get(name, "") for name in (ALLOCATOR_VARIABLE, *OLDER_VARIABLES))


def _end(number: int, frame: FrameType | None) -> None:
    try:
        os.write(2, b"error: interrupted\n")
    finally:
        os._exit(INTERRUPTED)
