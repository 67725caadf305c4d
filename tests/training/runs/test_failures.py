"""Runs that end early: the message for the user, and the files in the run's directory."""

import errno
import json
import os
import subprocess
import sys

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from offload.sharing import OWN_HOMES
from tests import ROOT
from training.errors import UserError
from training.runs.failures import explain


def os_error(number, name=None):
    return OSError(number, os.strerror(number), name)


@pytest.mark.parametrize(
    ("error", "status", "reason"),
    [
        (UserError("steps=0: must be at least 1"), "failed", "steps=0: must be at least 1"),
        (UserError("two\n  lines"), "failed", "two lines"),
        (KeyboardInterrupt(), "interrupted", "interrupted"),
        (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has"),
            "out_of_memory",
            "the GPU is out of memory (2.50 GiB more needed): end other programs that use it, or run the same command",
        ),
        (RuntimeError("CUDA error: out of memory\nCompile with"), "out_of_memory", "the GPU is out of memory: end"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when"), "out_of_memory", "the GPU is out of memory: "),
        (MemoryError(), "out_of_memory", "the host is out of memory: end"),
        (os_error(errno.ENOMEM), "out_of_memory", "the host is out of memory: end"),
        (os_error(errno.ENOSPC, "/a/b"), "failed", "the disk is full (/a/b): free some space"),
        (
            os_error(errno.EDQUOT),
            "failed",
            "the disk is full: free some space, or choose another place with hydra.run.dir=PATH, for a sweep hydra.",
        ),
        (RuntimeError("write: No space left on device (28)"), "failed", "the disk is full: free some space"),
        (FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "x.txt"), "failed", "x.txt: No such file"),
        (os_error(errno.EACCES, "x.txt"), "failed", "x.txt: Permission denied"),
        (
            RuntimeError(f"w was changed in a forward: {OWN_HOMES}"),
            "failed",
            "w was changed in a forward: give each process a home of its own: parallel.homes=own",
        ),
        (RuntimeError("can't start new thread"), "failed", "the system starts no more threads for this user or"),
    ],
)
def test_what_the_user_can_mend_is_one_line(error, status, reason):
    failure = explain(error)
    assert failure.status == status
    assert failure.reason.startswith(reason)
    assert "\n" not in failure.reason
    assert failure.fixable


@pytest.mark.parametrize("error", [ValueError("wrong\nshape"), RuntimeError("CUDA error: misaligned"), KeyError("k")])
def test_a_broken_program_is_not_fixable(error):
    failure = explain(error)
    assert failure.status == "failed"
    assert failure.reason.startswith(type(error).__name__)
    assert "\n" not in failure.reason
    assert not failure.fixable


def test_the_host_allocator_of_torch_is_host_memory():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert explain(caught.value).reason.startswith("the host is out of memory")


def test_what_a_constructor_raised_is_found_behind_hydra():
    with pytest.raises(InstantiationException) as caught:
        instantiate(
            {"_target_": "pathlib.Path.read_text", "_args_": [{"_target_": "pathlib.Path", "_args_": ["no.txt"]}]}
        )
    assert explain(caught.value) == ("failed", "no.txt: No such file or directory", True)


SCRIPT = """
import errno, os, signal, sys, time
from pathlib import Path
from training.errors import UserError
from training.runs.failures import failures_recorded

with failures_recorded(Path(sys.argv[1])):
    exec(sys.argv[2])
"""


def run(run_dir, action, **environment):
    process = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(run_dir), action],
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )
    path = run_dir / "summary.json"
    return process, json.loads(path.read_text()) if path.exists() else None


def test_a_mistake_ends_the_process_with_one_line(tmp_path):
    process, summary = run(tmp_path, "raise UserError('device=cuda: no GPU')")
    assert process.returncode == 1
    assert process.stderr == "error: device=cuda: no GPU\n"
    assert summary == {"status": "failed", "reason": "device=cuda: no GPU"}


def test_what_an_error_quotes_cannot_act_on_the_terminal(tmp_path):
    quoted = "'a' + chr(27) + '[2J' + chr(13) + chr(0x202e) + chr(0xdcff)"
    process, summary = run(tmp_path, f"raise UserError({quoted})")
    assert process.stderr == "error: a\\x1b[2J \\u202e\\xff\n"
    assert summary["status"] == "failed"
    process, _ = run(tmp_path, f"raise ValueError({quoted})")
    assert process.stderr.startswith("Traceback")
    assert not set(process.stderr) & set("\x1b\r\u202e")


def test_hydra_full_error_adds_the_traceback(tmp_path):
    process, _ = run(tmp_path, "raise UserError('device=cuda: no GPU')", HYDRA_FULL_ERROR="1")
    assert process.stderr.startswith("Traceback")
    assert process.stderr.endswith("error: device=cuda: no GPU\n")


def test_a_broken_program_keeps_its_traceback(tmp_path):
    process, summary = run(tmp_path, "raise ValueError('bad shape')")
    assert process.returncode == 1
    assert process.stderr.startswith("Traceback")
    assert process.stderr.endswith("error: ValueError: bad shape\n")
    assert summary == {"status": "failed", "reason": "ValueError: bad shape"}


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_an_interrupted_run_says_so(tmp_path, name):
    process, summary = run(tmp_path, f"os.kill(os.getpid(), signal.{name}); time.sleep(60)")
    assert process.returncode == 130
    assert process.stderr == "error: interrupted\n"
    assert summary == {"status": "interrupted", "reason": "interrupted"}


def test_a_signal_that_comes_again_does_not_change_how_a_run_ends(tmp_path):
    # Once more while the summary is written, and once after that.
    action = (
        "import atexit, training.runs.failures as failures; again = lambda: os.kill(os.getpid(), signal.SIGTERM);"
        "write = failures.write_summary; failures.write_summary = lambda *a: (again(), write(*a));"
        "atexit.register(again); again(); time.sleep(60)"
    )
    process, summary = run(tmp_path, action)
    assert (process.returncode, process.stderr) == (130, "error: interrupted\n")
    assert summary == {"status": "interrupted", "reason": "interrupted"}


def test_a_full_disk_is_one_line_and_no_summary(tmp_path):
    # A limit on the size of files makes every write fail, as a full disk does.
    action = (
        "import resource; signal.signal(signal.SIGXFSZ, signal.SIG_IGN);"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0));"
        "raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), 'metrics.jsonl')"
    )
    process, summary = run(tmp_path, action)
    assert process.returncode == 1
    assert process.stderr.startswith("error: the disk is full (metrics.jsonl): free some space, ")
    assert "Traceback" not in process.stderr
    assert summary is None
    assert list(tmp_path.iterdir()) == []
