"""Requests to stop: the effect of signals on a run that can save itself, and of the end of a sweep on its jobs."""

import math
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.in_process import signals_as_before
from tests.training.helpers.sweeps import runs, wait_for, wait_for_end
from training.runs import signals
from training.runs.signals import PARENT_VARIABLE, SAME_REQUEST_S, SIGNALS, WORTH_SAVING_S, Interruption, StopRequest

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")


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


CHILD = """
import os, sys, time
from training.runs.signals import PARENT_VARIABLE, end_with_parent
end_with_parent()
assert PARENT_VARIABLE not in os.environ
open(sys.argv[1] + ".partial", "w").write(str(os.getpid()))
os.rename(sys.argv[1] + ".partial", sys.argv[1])
time.sleep(float(sys.argv[2]))
"""
# Starts CHILD as a sweep does, and waits for it.
PARENT = f"""
import os, subprocess, sys
command = [sys.executable, "-c", {CHILD!r}, *sys.argv[1:]]
subprocess.run(command, env=os.environ | {{"{PARENT_VARIABLE}": str(os.getpid())}})
"""
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


@on_linux
def test_a_process_whose_parent_is_killed_gets_sigterm(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "pid"), "600"], env=ENVIRONMENT)
    child = wait_for(tmp_path / "pid")
    assert runs(child)
    parent.kill()
    parent.wait(300)
    wait_for_end(child)


def child(folder: Path, parent: int | None) -> subprocess.CompletedProcess:
    environment = ENVIRONMENT if parent is None else ENVIRONMENT | {PARENT_VARIABLE: str(parent)}
    return subprocess.run([sys.executable, "-c", CHILD, str(folder / "pid"), "0"], env=environment, timeout=300)


@on_linux
def test_a_process_whose_parent_ended_before_ends_at_once(tmp_path: Path):
    # The number of any process but the parent's: the parent is another one by now.
    assert child(tmp_path, parent=1 if os.getpid() != 1 else 2).returncode == -signal.SIGTERM
    assert not (tmp_path / "pid").exists()


@on_linux
def test_a_scheduler_s_signal_to_all_processes_of_a_job_is_left_to_the_parent(tmp_path: Path):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "pid"), "0.5"]
    process = subprocess.Popen(command, env=ENVIRONMENT | {PARENT_VARIABLE: str(os.getpid())})
    wait_for(tmp_path / "pid")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(300) == 0


@on_linux
def test_a_parent_that_lives_and_none_change_nothing(tmp_path: Path):
    for parent in (os.getpid(), None):
        assert child(tmp_path, parent).returncode == 0
