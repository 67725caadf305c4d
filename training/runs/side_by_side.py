"""Runs functions in several threads, in as many as the system grants."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeVar

logger = logging.getLogger(__name__)

T = TypeVar("T")


def side_by_side(
    functions: Sequence[Callable[[], T]], threads: int, given_up: threading.Event | None = None
) -> list[T]:
    """Calls the functions in at most `threads` threads, the caller's among them, and returns their results in order.

    If the system starts no more threads, those there are, and at least the caller, do the work; this is a warning. The
    first error, or an interrupt of the caller, sets `given_up`, which running functions may look at; functions that
    have not begun are left out, and the error is raised when all have returned.
    """
    given_up = given_up or threading.Event()
    waiting = deque(enumerate(functions))
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def work() -> None:
        while not given_up.is_set():
            try:
                index, function = waiting.popleft()
            except IndexError:
                return
            try:
                results[index] = function()
            except BaseException as error:
                errors.append(error)
                given_up.set()

    helpers: list[threading.Thread] = []
    try:
        for _ in range(min(threads, len(functions)) - 1):
            thread = threading.Thread(target=work, name="side by side")
            try:
                thread.start()
            except RuntimeError as error:
                logger.warning("%s: files are written and read in %d threads of %d", error, len(helpers) + 1, threads)
                break
            helpers.append(thread)
        work()
        _join(helpers)
    except BaseException:
        given_up.set()
        _join(helpers)
        raise
    if errors:
        raise errors.pop(0)
    return [results[index] for index in range(len(functions))]


def _join(threads: Sequence[threading.Thread]) -> None:
    for thread in threads:
        thread.join()
