"""A process that ends with the one that started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.sweeps import runs, wait_for, wait_for_end
from training.runs.parent import PARENT_VARIABLE

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")

CHILD = """
import os, sys, time
from training.runs.parent import PARENT_VARIABLE, end_with_parent
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


def test_a_process_whose_parent_is_killed_gets_sigterm(tmp_path: Path):
    parent = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path / "pid"), "600"], env=ENVIRONMENT)
    child = wait_for(tmp_path / "pid")
    assert runs(child)
    parent.kill()
    parent.wait()
    wait_for_end(child)


def child(folder: Path, parent: int | None) -> subprocess.CompletedProcess:
    environment = ENVIRONMENT if parent is None else ENVIRONMENT | {PARENT_VARIABLE: str(parent)}
    return subprocess.run([sys.executable, "-c", CHILD, str(folder / "pid"), "0"], env=environment, timeout=300)


def test_a_process_whose_parent_ended_before_ends_at_once(tmp_path: Path):
    # The number of any process but the parent's: the parent is another one by now.
    assert child(tmp_path, parent=1 if os.getpid() != 1 else 2).returncode == -signal.SIGTERM
    assert not (tmp_path / "pid").exists()


def test_a_scheduler_s_signal_to_all_processes_of_a_job_is_left_to_the_parent(tmp_path: Path):
    command = [sys.executable, "-c", CHILD, str(tmp_path / "pid"), "0.5"]
    process = subprocess.Popen(command, env=ENVIRONMENT | {PARENT_VARIABLE: str(os.getpid())})
    wait_for(tmp_path / "pid")
    process.send_signal(signal.SIGUSR2)
    assert process.wait(300) == 0


def test_a_parent_that_lives_and_none_change_nothing(tmp_path: Path):
    for parent in (os.getpid(), None):
        assert child(tmp_path, parent).returncode == 0
