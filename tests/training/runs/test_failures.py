"""Runs that end early: the message for the user, and the files in the run's directory."""

import errno
import json
import logging
import os
import signal

import pytest
import torch
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from offload.sharing import OWN_HOMES
from tests.training.helpers.in_process import signals_as_before
from training.errors import UserError
from training.runs import failures
from training.runs.failures import explain, failures_recorded, write_summary
from training.runs.signals import SIGNALS


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


@pytest.fixture
def run(tmp_path, capsys, monkeypatch):
    """Returns a function that calls another as the run in `tmp_path`: its exit status, its message, and its summary."""
    monkeypatch.setattr(logging, "raiseExceptions", True)

    def run(action):
        with signals_as_before():
            for number in SIGNALS:
                signal.signal(number, signal.default_int_handler)
            with pytest.raises(SystemExit) as ended, failures_recorded(tmp_path):
                action()
        path = tmp_path / "summary.json"
        return ended.value.code, capsys.readouterr().err, json.loads(path.read_text()) if path.exists() else None

    return run


def failing(error):
    def action():
        raise error

    return action


def test_a_mistake_ends_the_process_with_one_line(run, monkeypatch):
    mistake = failing(UserError("device=cuda: no GPU"))
    summary = {"status": "failed", "reason": "device=cuda: no GPU"}
    assert run(mistake) == (1, "error: device=cuda: no GPU\n", summary)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    _, printed, _ = run(mistake)
    assert printed.startswith("Traceback")
    assert printed.endswith("error: device=cuda: no GPU\n")


def test_what_an_error_quotes_cannot_act_on_the_terminal(run):
    quoted = "a\x1b[2J\r\u202e\udcff"
    _, printed, summary = run(failing(UserError(quoted)))
    assert printed == "error: a\\x1b[2J \\u202e\\xff\n"
    assert summary["status"] == "failed"
    _, printed, _ = run(failing(ValueError(quoted)))
    assert printed.startswith("Traceback")
    assert not set(printed) & set("\x1b\r\u202e")


def test_a_broken_program_keeps_its_traceback(run):
    status, printed, summary = run(failing(ValueError("bad shape")))
    assert (status, summary) == (1, {"status": "failed", "reason": "ValueError: bad shape"})
    assert printed.startswith("Traceback")
    assert printed.endswith("error: ValueError: bad shape\n")


INTERRUPTED = (130, "error: interrupted\n", {"status": "interrupted", "reason": "interrupted"})


@pytest.mark.parametrize("number", SIGNALS)
def test_an_interrupted_run_says_so(run, number):
    assert run(lambda: os.kill(os.getpid(), number)) == INTERRUPTED


def test_a_signal_that_comes_while_the_summary_is_written_does_not_change_how_a_run_ends(run, monkeypatch):
    def again(*arguments):
        os.kill(os.getpid(), signal.SIGTERM)
        write_summary(*arguments)

    monkeypatch.setattr(failures, "write_summary", again)
    assert run(lambda: os.kill(os.getpid(), signal.SIGTERM)) == INTERRUPTED


def test_a_full_disk_is_one_line_and_no_summary(run, tmp_path, monkeypatch):
    def full(*_):
        raise os_error(errno.ENOSPC, "metrics.jsonl")

    monkeypatch.setattr(os, "fsync", full)
    status, printed, summary = run(full)
    assert (status, summary) == (1, None)
    assert printed.startswith("error: the disk is full (metrics.jsonl): free some space, ")
    assert "Traceback" not in printed
    assert list(tmp_path.iterdir()) == []
