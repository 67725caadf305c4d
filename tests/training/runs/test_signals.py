"""Requests to stop: the effect of signals on a run that can save itself."""

from __future__ import annotations

import math
import os
import signal
from contextlib import suppress

import pytest

from tests.training.helpers.in_process import signals_as_before
from training.runs import signals
from training.runs.signals import SAME_REQUEST_S, SIGNALS, WORTH_SAVING_S, Interruption, StopRequest


def test_once_the_run_is_saved_signals_come_too_late():
    with signals_as_before():
        with StopRequest(after_s=0.0) as stop:
            stop.settle()
        for number in SIGNALS:
            os.kill(os.getpid(), number)


def test_the_second_request_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    before = signal.getsignal(signal.SIGTERM)
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with StopRequest(after_s=0.0) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        now += 0.9 * SAME_REQUEST_S
        os.kill(os.getpid(), signal.SIGINT)
        now += 0.2 * SAME_REQUEST_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("after_s", [0.0, math.inf])
def test_an_interruption_that_a_library_swallowed_comes_again(name: str, after_s: float):
    with signals_as_before():
        Interruption().install()
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.Signals[name])
        with pytest.raises(KeyboardInterrupt), StopRequest(after_s):
            pass


def test_an_interruption_that_is_swallowed_in_a_step_comes_again():
    with signals_as_before(), StopRequest(after_s=WORTH_SAVING_S) as stop:
        stop.raise_again()
        with suppress(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            stop.raise_again()


def test_a_signal_that_is_ignored_stays_ignored():
    with signals_as_before():
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        with StopRequest(after_s=0.0) as stop:
            os.kill(os.getpid(), signal.SIGHUP)
            assert stop.signal is None
            os.kill(os.getpid(), signal.SIGTERM)
            assert stop.signal == "SIGTERM"


def test_where_nothing_is_saved_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(after_s=math.inf):
        assert signal.getsignal(signal.SIGINT) is before


def test_what_would_cost_little_to_repeat_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with StopRequest(after_s=WORTH_SAVING_S) as stop:
        now += WORTH_SAVING_S - 5
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
        now += 10
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.signal == "SIGINT"
