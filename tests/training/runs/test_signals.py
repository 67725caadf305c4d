"""Requests to stop: the effect of signals on a run that can save itself."""

from __future__ import annotations

import os
import signal

import pytest

from tests.training.helpers.in_process import signals_as_before
from training.runs import signals
from training.runs.signals import SAME_REQUEST_S, SIGNALS, StopRequest


def test_once_the_run_is_saved_signals_come_too_late():
    with signals_as_before():
        with StopRequest(enabled=True) as stop:
            stop.settle()
        for number in SIGNALS:
            os.kill(os.getpid(), number)


def test_the_second_request_ends_at_once(monkeypatch: pytest.MonkeyPatch):
    before = signal.getsignal(signal.SIGTERM)
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    with StopRequest(enabled=True) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.signal == "SIGTERM"
        now += 0.9 * SAME_REQUEST_S
        os.kill(os.getpid(), signal.SIGINT)
        now += 0.2 * SAME_REQUEST_S
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGTERM) is before


def test_where_nothing_is_saved_signals_are_left_alone():
    before = signal.getsignal(signal.SIGINT)
    with StopRequest(enabled=False):
        assert signal.getsignal(signal.SIGINT) is before
