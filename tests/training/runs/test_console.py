"""The console may fail: whatever is lost, in whichever way, the program behind it runs to its end."""

import logging
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.in_process import signals_as_before
from training.runs.failures import failures_recorded

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
