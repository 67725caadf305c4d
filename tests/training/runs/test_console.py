"""The console may fail: whatever is lost, in whichever way, the program behind it runs to its end."""

from __future__ import annotations

import fcntl
import logging
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.held_run import start_held
from tests.training.helpers.in_process import TINY_RUN, signals_as_before
from training.runs.failures import failures_recorded
from training.runs.records import read_metrics, read_summary

# Writes to the console in every way in which a run does; its log file tells what went wrong.
PROGRAM = """
import logging, os, subprocess, sys
from pathlib import Path
from rich.console import Console
from tqdm import tqdm
from training.runs import console
from training.runs.failures import failures_recorded

console.tolerate_failures()
run_dir = Path(sys.argv[1])
handlers = [logging.StreamHandler(), logging.FileHandler(run_dir / "train.log")]
logging.basicConfig(level="INFO", format="%(message)s", handlers=handlers)
with failures_recorded(run_dir):
    for number in range(4000):
        print("a line on standard output", number, flush=True)
        # Of both streams more than a pipe holds: so none is written to its end before the reader of a pipe is gone.
        logging.info("a message of several words")
    Console().print("[bold]a title")
    for stream in (sys.stdout, sys.stderr):
        for _ in tqdm(range(3), file=stream, mininterval=0):
            pass
    subprocess.run(["echo", "of another program"], check=True)
    # Into the stream's buffer, for Python to flush at its exit.
    sys.stdout.write("the last words, \\udc80 among them")
    (run_dir / "done").touch()
"""


def piped(redirections: str) -> tuple[str, ...]:
    """The begin of a command line: a shell that redirects the program behind it, and ends with its exit status."""
    return "bash", "-o", "pipefail", "-c", f'"$@" {redirections}', "bash"


def shell(run_dir: Path, redirections: str, *python: str) -> subprocess.CompletedProcess[str]:
    """Runs PROGRAM with its console redirected as a shell does it."""
    run_dir.mkdir(exist_ok=True)
    (run_dir / "program.py").write_text(PROGRAM)
    return subprocess.run(
        [*piped(redirections), sys.executable, *python, str(run_dir / "program.py"), str(run_dir)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.parametrize(
    ("redirections", "lost"),
    [
        ("", {}),
        ("| head -1", {"stdout": "Broken pipe"}),
        ("2> >(head -1)", {"stderr": "Broken pipe"}),
        ("2>&1 | head -1", {"stdout": "Broken pipe", "stderr": "Broken pipe"}),
        ("> /dev/full", {"stdout": "No space left on device"}),
        ("2> /dev/full", {"stderr": "No space left on device"}),
        (">&-", {}),
        ("2>&-", {}),
        ("<&- >&- 2>&-", {}),
    ],
)
@pytest.mark.slow
def test_whatever_is_lost_a_program_ends_well_and_its_log_says_so(tmp_path: Path, redirections: str, lost: dict):
    result = shell(tmp_path, redirections)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "done").exists()
    assert not {"Traceback", "Exception ignored", "BrokenPipeError"} & set(result.stderr.split())
    log = (tmp_path / "train.log").read_text()
    assert log.count("a message of several words\n") == 4000
    # A closed stream does not leave its number to the log file, which other programs would then print into.
    assert "of another program" not in log
    noted = [line for line in log.splitlines() if " is lost " in line]
    expected = [
        f"{name} is lost ({why}): the run continues, and its messages are in train.log" for name, why in lost.items()
    ]
    assert noted == expected
    if not redirections:
        assert "of another program" in result.stdout
        assert result.stdout.endswith("the last words, \\udc80 among them")


def test_with_unbuffered_output_a_console_may_fail_too(tmp_path: Path):
    assert shell(tmp_path, "| head -1", "-u").returncode == 0
    assert (tmp_path / "done").exists()


def test_a_pipe_that_another_program_made_non_blocking_loses_nothing(tmp_path: Path):
    read, write = os.pipe()
    os.set_blocking(write, False)
    (tmp_path / "program.py").write_text(PROGRAM)
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=write,
        stderr=subprocess.DEVNULL,
    )
    os.close(write)
    try:
        # Until it is full: 64 KiB, and the program writes more.
        time.sleep(1)
        with open(read, "rb") as reader:
            output = reader.read()
        assert process.wait(300) == 0
    finally:
        process.kill()
    assert output.count(b"a line on standard output") == 4000


def test_streams_that_are_not_the_process_s_own_are_left_alone(capsys):
    from training.runs import console

    before = sys.stdout, sys.stderr
    console.tolerate_failures()
    assert (sys.stdout, sys.stderr) == before


def test_what_is_lost_is_noted_once_and_not_in_the_log_of_an_earlier_run(tmp_path: Path, monkeypatch, caplog):
    from training.runs import console

    read, write = os.pipe()
    os.close(read)
    null = os.open(os.devnull, os.O_WRONLY)
    lost = console._Console(write, null)
    monkeypatch.setattr(console, "_consoles", {"stdout": lost})
    assert lost.write(b"text") == 4
    assert lost.write(b"more") == 4
    (tmp_path / "summary.json").write_text('{"status": "ok", "steps": 3}')
    with caplog.at_level(logging.WARNING):
        with signals_as_before(), failures_recorded(tmp_path):
            pass
        assert not caplog.records
        console.note_failures()
        console.note_failures()
    assert [record.message.partition(":")[0] for record in caplog.records] == ["stdout is lost (Broken pipe)"]
    for descriptor in (write, null):
        os.close(descriptor)


RUN = (*TINY_RUN, "dataset=synthetic", "log_every=1", "checkpoint.every=3")


@pytest.mark.parametrize("redirections", ["| head -1", "> /dev/full 2> /dev/full"])
@pytest.mark.slow
def test_a_run_without_a_console_is_complete(tmp_path: Path, redirections: str):
    """The first line of a pipe is the plan's, and the pipe breaks while the rest is printed."""
    overrides = (*RUN, "tracking=offline", f"hydra.run.dir={tmp_path}")
    command = [*piped(redirections), sys.executable, "train.py", *overrides]
    environment = {name: value for name, value in os.environ.items() if name != "WANDB_MODE"}
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    assert read_summary(tmp_path)["status"] == "ok"
    assert [record["train/step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert {path.name for path in (tmp_path / "checkpoints").iterdir()} == {"step-00000003", "step-00000006"}
    log = (tmp_path / "train.log").read_text()
    assert "stdout is lost" in log
    assert "tracking stopped" not in log
    assert len(list((tmp_path / "wandb").glob("offline-run-*"))) == 1


@pytest.mark.slow
@pytest.mark.parametrize("nohup", [False, True])
def test_a_closed_terminal_ends_a_run_that_is_saved_unless_nohup_was_asked_for(tmp_path: Path, nohup: bool):
    master, slave = pty.openpty()

    def own_terminal() -> None:
        fcntl.ioctl(slave, termios.TIOCSCTTY, 0)
        signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)

    # Under nohup the run goes on for some steps more, once the terminal is closed.
    steps = 60 if nohup else 10**6
    overrides = (*RUN, f"steps={steps}", "checkpoint.every=1000000", f"hydra.run.dir={tmp_path}")
    # A terminal without a size shows no bar.
    termios.tcsetwinsize(slave, (24, 80))
    process = start_held(
        *overrides,
        step=3 if nohup else 0,
        until=tmp_path / "closed",
        stdin=slave,
        stdout=slave,
        stderr=slave,
        start_new_session=True,
        preexec_fn=own_terminal,
    )
    os.close(slave)
    metrics = tmp_path / "metrics.jsonl"
    try:
        while not (metrics.exists() and metrics.stat().st_size):
            assert process.poll() is None
            if select.select([master], [], [], 0.05)[0]:
                os.read(master, 4096)
        os.close(master)
        (tmp_path / "closed").touch()
        assert process.wait(300) == 0
    finally:
        process.kill()
    summary = read_summary(tmp_path)
    log = (tmp_path / "train.log").read_text()
    if nohup:
        assert (summary["status"], summary["steps"]) == ("ok", steps)
        assert "stdout is lost (Input/output error)" in log
        return
    assert summary["status"] == "stopped"
    folder = tmp_path / "checkpoints" / f"step-{summary['steps']:08d}"
    assert summary["reason"] == f"SIGHUP: resume with resume={folder}"
    assert folder.is_dir()
