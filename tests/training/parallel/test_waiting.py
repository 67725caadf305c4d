"""Waits that a signal can interrupt."""

from __future__ import annotations

import signal
import threading
import weakref
from functools import partial

import pytest
import torch

from training.parallel.waiting import Waiter


def test_calls_are_made_one_after_another():
    waiter, made = Waiter(), []
    waiter.wait(lambda: made.append(1))
    waiter.wait(lambda: made.append(2))
    assert made == [1, 2]
    waiter.close()


def test_an_error_of_the_call_is_raised():
    waiter = Waiter()
    with pytest.raises(RuntimeError, match="broken"):
        waiter.wait(lambda: (_ for _ in ()).throw(RuntimeError("broken")))
    waiter.wait(lambda: None)
    waiter.close()


def test_a_call_that_has_returned_is_kept_by_nobody():
    """What the thread held as the process ends, such as a received tensor, it could not free: the process aborted."""
    waiter, tensor = Waiter(), torch.ones(1)
    seen = weakref.ref(tensor)
    waiter.wait(partial(tensor.add_, 1))
    del tensor
    assert seen() is None
    waiter.close()


@pytest.mark.parametrize("thread", ["main", "other"])
def test_a_signal_interrupts_the_wait_and_not_the_call(thread: str):
    """A signal that the system delivers on another thread wakes no wait; nor does one that comes as a wait begins."""
    waiter, go, ended = Waiter(), threading.Event(), []

    def call() -> None:
        signalled = threading.main_thread().ident if thread == "main" else threading.get_ident()
        signal.pthread_kill(signalled, signal.SIGINT)
        go.wait(60)
        ended.append(call)

    with pytest.raises(KeyboardInterrupt):
        waiter.wait(call)
    assert not ended
    go.set()
    waiter.close()
