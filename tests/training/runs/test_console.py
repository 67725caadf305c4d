"""The console may fail: whatever is lost, in whichever way, the program behind it runs to its end."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from training.runs import console

# Writes to the console in every way in which a run does.
PROGRAM = """
import logging, subprocess, sys
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


@pytest.mark.parametrize(
    "redirections", ["", "| head -1", "2> >(head -1)", "2>&1 | head -1", "> /dev/full", "2> /dev/full"]
)
@pytest.mark.slow
def test_whatever_is_lost_a_program_ends_well(tmp_path: Path, redirections: str):
    (tmp_path / "program.py").write_text(PROGRAM)
    shell = ("bash", "-o", "pipefail", "-c", f'"$@" {redirections}', "bash")
    result = subprocess.run(
        [*shell, sys.executable, str(tmp_path / "program.py"), str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "done").exists()
    assert not {"Traceback", "Exception ignored", "BrokenPipeError"} & set(result.stderr.split())
    log = (tmp_path / "train.log").read_text()
    assert log.count("a message of several words\n") == 4000
    assert "of another program" not in log
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
    before = sys.stdout, sys.stderr
    console.tolerate_failures()
    assert (sys.stdout, sys.stderr) == before
