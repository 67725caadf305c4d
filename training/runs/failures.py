"""How a run that ends early tells its user: one line where the user can mend the cause, a traceback where not."""

from __future__ import annotations

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

from training.errors import UserError
from training.runs.directory import RunDirectory
from training.runs.signals import once_a_request


class Failure(NamedTuple):
    """Why a run ended early."""

    status: str
    """failed, out_of_memory or interrupted"""
    reason: str
    """one line"""
    mendable: bool
    """whether `reason` tells the user enough to mend it, so that a traceback would only hide it"""


@contextmanager
def failures_recorded(run_dir: Path) -> Iterator[RunDirectory]:
    """Around a run: a failure ends the process with a message, a non-zero status and a summary.json that says why.

    The traceback is in train.log too. Neither is written where an earlier run's figures are and the run has not taken
    the directory. SIGTERM, by which schedulers take a machine back, ends a run as Ctrl-C does.
    """
    # Late, because both take UserError from here.
    from training.metrics.files import SUMMARY_FILE, write_summary
    from training.runs.directory import RunDirectory

    signal.signal(signal.SIGTERM, once_a_request(signal.default_int_handler))
    # A log line that a full disk refuses is not worth a traceback of its own.
    logging.raiseExceptions = False
    directory = RunDirectory(run_dir)
    try:
        yield directory
    except (Exception, KeyboardInterrupt) as error:
        # Another signal would cut off what is written here; SIGTERM, which repeats itself, the exit status too.
        interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        exit_status, failure = report(error), explain(error)
        if directory.taken:
            # Below the level that the console shows.
            logging.info("error: %s", failure.reason, exc_info=error)
            try:
                write_summary(run_dir, {"status": failure.status, "reason": failure.reason})
            except UserError as refused:
                print(f"warning: no {SUMMARY_FILE}: {refused}", file=sys.stderr)
        signal.signal(signal.SIGINT, interrupt)
        sys.exit(exit_status)


@contextmanager
def refusals_reported() -> Iterator[None]:
    """Around what is refused before a run may write anything: one line, and the process ends."""
    try:
        yield
    except UserError as error:
        sys.exit(report(error))


def report(error: BaseException) -> int:
    """Prints what `error` means to the user, and returns the exit status that says so to other programs.

    HYDRA_FULL_ERROR=1 gives the traceback in every case.
    """
    failure = explain(error)
    sys.stdout.flush()
    if not failure.mendable or os.environ.get("HYDRA_FULL_ERROR") == "1":
        traceback.print_exception(error)
    print(f"error: {failure.reason}", file=sys.stderr)
    return 130 if failure.status == "interrupted" else 1


def explain(error: BaseException) -> Failure:
    """What `error` means to the person who started the run."""
    # Late: tools that compose no configuration raise UserError without Hydra installed.
    from hydra.errors import InstantiationException

    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    text = " ".join(str(error).split())
    number = error.errno if isinstance(error, OSError) else None
    if isinstance(error, UserError):
        return Failure(error.status, text, True)
    if isinstance(error, KeyboardInterrupt):
        return Failure("interrupted", "interrupted", True)
    if is_device_memory(error):
        reason = (
            f"the GPU is out of memory{more_wanted(error)}: take a smaller batch_size, more microbatches,"
            " recompute=block or another offload mode"
        )
        return Failure("out_of_memory", reason, True)
    if isinstance(error, MemoryError) or number == errno.ENOMEM or "DefaultCPUAllocator: can't allocate" in text:
        reason = (
            "the host is out of memory: take a smaller model, a smaller batch_size, precision=bf16, or an offload"
            " mode that leaves more on the GPU"
        )
        return Failure("out_of_memory", reason, True)
    if number in (errno.ENOSPC, errno.EDQUOT) or "No space left on device" in text:
        where = f" ({error.filename})" if number and error.filename else ""
        reason = f"the disk is full{where}: free some space, or choose another place with hydra.run.dir=PATH"
        return Failure("failed", reason, True)
    if number and error.filename is not None:
        return Failure("failed", f"{error.filename}: {error.strerror}", True)
    return Failure("failed", f"{type(error).__name__}: {text}", False)


def is_device_memory(error: BaseException) -> bool:
    """Whether a GPU had no room for what was asked of it."""
    # Where torch was never imported, nothing can be its error.
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(error, RuntimeError):
        return False
    known = ("CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED")
    return isinstance(error, torch.OutOfMemoryError) or any(words in str(error) for words in known)


def more_wanted(error: BaseException) -> str:
    """What was asked of a GPU in vain, in brackets; nothing where `error` does not say."""
    asked = re.search(r"Tried to allocate ([\d.]+ \w+)", str(error))
    return f" ({asked[1]} more wanted)" if asked else ""
