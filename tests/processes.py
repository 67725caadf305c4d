"""Processes that a test starts, and that end with it."""

import multiprocessing
from collections.abc import Callable
from typing import Any


def run_processes(
    work: Callable[..., None], arguments: list[tuple[Any, ...]], start_method: str, limit_s: float
) -> None:
    """Calls `work` with each of `arguments` in a process of its own, all at once, and requires that each succeeds."""
    start: Callable = multiprocessing.get_context(start_method).Process
    processes = [start(target=work, args=each) for each in arguments]
    try:
        for process in processes:
            process.start()
        for process in processes:
            process.join(limit_s)
            assert process.exitcode == 0
    finally:
        # One that hangs would hold the pipes of pytest's workers, which then never end.
        for process in processes:
            process.kill()
