"""Libraries that are not installed, and Ctrl-C while they are imported: one line, whatever the import does with it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from training.runs import starting

# As libraries do: torch's import swallows Ctrl-C in some of its parts, and aborts in others.
SWALLOWS = """
import os, signal
try:
    os.kill(os.getpid(), signal.SIGINT)
except BaseException:
    pass
"""


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess:
    # A process in the background would ignore Ctrl-C.
    handled = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n"
    arguments = [handled + argument if argument.startswith("\n") else argument for argument in arguments]
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=ROOT, env=os.environ | environment, capture_output=True, text=True, timeout=300)


def test_a_python_without_the_libraries_is_one_line():
    # -S leaves out what is installed.
    ended = run("-S", "train.py", "steps=1")
    assert ended.returncode == 1
    assert ended.stderr == (
        f"error: torch, hydra, omegaconf are not installed for {sys.executable}: put scripts/run.sh in front of the"
        f" command, or install: {sys.executable} -m pip install -r requirements.txt\n"
    )


@pytest.mark.parametrize(
    ("command", "library"),
    [
        ("train.py", "hydra"),
        ("scripts/generate.py RUN PROMPT", "torch"),
        ("scripts/export.py RUN OUT", "torch"),
        ("scripts/compare.py DIR", "yaml"),
        ("scripts/probe.py --dry-run", "torch"),
    ],
)
def test_a_program_ends_where_an_import_swallows_ctrl_c(tmp_path: Path, command: str, library: str):
    (tmp_path / f"{library}.py").write_text(SWALLOWS + "raise SystemExit('the import ran on')")
    ended = run(*command.split(), PYTHONPATH=str(tmp_path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "", "error: interrupted\n")


def test_after_the_imports_ctrl_c_is_an_exception_again():
    script = "\nfrom training.runs import starting\nstarting.end_on_interrupt()\nstarting.interrupt_as_usual()"
    ended = run("-c", script + SWALLOWS + "print('caught')")
    assert (ended.returncode, ended.stdout) == (0, "caught\n")


INTERRUPTED = """
from training.runs import starting
with starting.interrupt_in_one_line():
    try:
        raise KeyboardInterrupt
    finally:
        print("cleaned")
"""


def test_an_interrupted_program_cleans_up_and_ends_with_one_line():
    ended = run("-c", INTERRUPTED)
    assert (ended.returncode, ended.stdout, ended.stderr) == (130, "cleaned\n", "error: interrupted\n")


def test_in_the_background_ctrl_c_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        starting.end_on_interrupt()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        starting.interrupt_as_usual()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
