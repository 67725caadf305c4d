"""Reports to the user why a run ended early: one line if the user can fix the cause, a traceback if not."""

import errno
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from hydra.errors import InstantiationException

from training.errors import UserError
from training.runs import starting
from training.runs.console import note_failures
from training.runs.directory import RunDirectory
from training.runs.files import SUMMARY_FILE
from training.runs.records import write_summary
from training.runs.signals import Interruption
from training.runs.starting import INTERRUPTED
from training.visible_text import visible, visible_lines

FAILED = 1
"""the exit status of a run that failed"""

# Without a configuration there is no better advice; `training.planning.fit` has it.
SHOWN_BY_PLAN = (
    "end other programs that use it, or run the same command with plan=true, which shows what takes how much"
)


class Failure(NamedTuple):
    """The early end of a run; `fixable`: the reason is enough for the user, and a traceback would only hide it."""

    status: str
    """failed, refused (it does not fit), out_of_memory or interrupted"""
    reason: str
    fixable: bool = True


@contextmanager
def failures_recorded(run_dir: Path) -> Iterator[RunDirectory]:
    """Surrounds a run; ends the process after a failure, with a message, a non-zero status and a summary.json.

    The traceback goes to the log file. In a directory with results of an earlier run, which this run has not `taken`,
    neither file is written. SIGTERM, which schedulers send, and SIGHUP, which a closing terminal sends, end a run as
    Ctrl-C does.
    """
    handled = Interruption().install()
    # A log line that a full disk refuses does not deserve a traceback of its own.
    logging.raiseExceptions = False
    directory = RunDirectory(run_dir)
    try:
        yield directory
    except (Exception, KeyboardInterrupt) as error:
        # Another signal would interrupt the writing below. These stay ignored to the end of the process, because
        # schedulers repeat SIGTERM and it would change the exit status.
        for number in handled:
            signal.signal(number, signal.SIG_IGN)
        exit_status = print_failure(error)
        if directory.taken:
            failure = explain(error)
            # At a level that the console does not show.
            logging.info("error: %s", failure.reason, exc_info=error)
            try:
                write_summary(run_dir, {"status": failure.status, "reason": failure.reason})
            except UserError as refused:
                print(f"warning: no {SUMMARY_FILE}: {visible(refused)}", file=sys.stderr)
        if signal.SIGINT in handled:
            signal.signal(signal.SIGINT, signal.default_int_handler)
        sys.exit(exit_status)
    finally:
        if directory.taken:
            note_failures()


@contextmanager
def refusals_reported() -> Iterator[None]:
    """Surrounds the checks before a run may write anything; ends the process with one line if they refuse the run."""
    try:
        yield
    except UserError as error:
        sys.exit(print_failure(error))


def print_failure(error: BaseException) -> int:
    """Prints what `error` means to the user, and returns the exit status.

    It prints the traceback too if the user cannot fix the error, and for HYDRA_FULL_ERROR=1.
    """
    failure = explain(error)
    sys.stdout.flush()
    if not failure.fixable or os.environ.get("HYDRA_FULL_ERROR") == "1":
        print(visible_lines("".join(traceback.format_exception(error))), end="", file=sys.stderr)
    print(f"error: {visible(failure.reason)}", file=sys.stderr)
    return INTERRUPTED if failure.status == "interrupted" else FAILED


def explain(error: BaseException) -> Failure:
    """Returns what `error` means to the person who started the run."""
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, UserError):
        return Failure(error.status, text)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", "interrupted")
    if is_device_memory(error):
        setting = "" if starting.segments_expand() else f"; {starting.ALLOCATOR_ADVICE}"
        return Failure("out_of_memory", f"the GPU is out of memory{requested(error)}: {SHOWN_BY_PLAN}{setting}")
    if is_host_memory(error):
        return Failure("out_of_memory", f"the host is out of memory: {SHOWN_BY_PLAN}")
    if isinstance(error, RuntimeError) and "can't start new thread" in text:
        return Failure(
            "failed",
            "the system starts no more threads for this user or container: raise `ulimit -u` or the container's limit"
            " of processes, or end other programs",
        )
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text:
        where = f" ({error.filename})" if number and error.filename else ""
        place = "hydra.run.dir=PATH, for a sweep hydra.sweep.dir=PATH"
        return Failure("failed", f"the disk is full{where}: free some space, or choose another place with {place}")
    if number and error.filename is not None:
        return Failure("failed", f"{error.filename}: {error.strerror}")
    # If the engine was never imported, the error cannot be one of its.
    sharing = sys.modules.get("offload.sharing")
    if sharing is not None and text.endswith(sharing.OWN_HOMES):
        return Failure("failed", f"{text}: parallel.homes=own")
    return Failure("failed", f"{type(error).__name__}: {text}", fixable=False)


def is_device_memory(error: BaseException) -> bool:
    """Tells whether a GPU had too little memory."""
    # If torch was never imported, the error cannot be one of torch's.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    known = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in known)


def is_host_memory(error: BaseException) -> bool:
    """Tells whether the host had too little memory."""
    refused = isinstance(error, OSError) and error.errno == errno.ENOMEM
    return isinstance(error, MemoryError) or refused or "DefaultCPUAllocator: can't allocate" in str(error)


def requested(error: BaseException) -> str:
    """Returns in brackets how much memory the failed request was for; nothing if `error` does not say it."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f" ({asked[1]} more needed)" if asked else ""
