"""Starts the other ranks of a run from a process that has imported all that they need, once: each saves five seconds.

Imports little itself, because that process imports it.
"""

import multiprocessing
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from types import SimpleNamespace
from unittest.mock import patch

# With what the first optimizer of a rank imports.
IMPORTED = (__name__, "training.run.follow", "torch._dynamo")


class ForkedRank:
    """A process as `Followers` knows it: a `subprocess.Popen` of `python -m training.run.follow`."""

    def __init__(self, environment: dict[str, str]):
        self._process = _context().Process(target=_follow, args=(environment,))
        self._process.start()
        self.pid = self._process.pid

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired("rank", timeout)
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


@contextmanager
def forked_ranks() -> Iterator[None]:
    """Inside the block ranks are forked from a process without any run, and inherit no patch of the test."""
    from training.parallel import launch

    programs = SimpleNamespace(**vars(subprocess) | {"Popen": lambda command, env, **_: ForkedRank(env)})
    with patch.object(launch, "subprocess", programs):
        yield


@cache
def _context() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    return context


def _follow(environment: dict[str, str]) -> None:
    from training.run.follow import main
    from training.runs.signals import PARENT_VARIABLE

    os.environ.clear()
    os.environ.update(environment)
    # The process that forked it, which ends with the test's.
    del os.environ[PARENT_VARIABLE]
    sys.exit(main())
