"""Ranks that end, hang or are not needed: how the run ends, what it saved, and that no process is left."""

import errno
import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.training.helpers.in_process import composed, run_here
from tests.training.helpers.results import content
from tests.training.helpers.sweeps import runs, wait_until
from tests.training.parallel.conftest import RUN, run_ranks
from training.errors import UserError
from training.parallel.group import Group
from training.parallel.launch import Followers, connected
from training.parallel.ranks import ALONE, RankLostError
from training.run import loop
from training.run.recorder import Recorder
from training.runs.signals import SIGNALS

SAVING = ("devices=2", "microbatches=1", "checkpoint.every=null", "checkpoint.on_signal=true")


@pytest.fixture
def at_step(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, Callable[[], None]], None]:
    """Returns a function that makes rank 0 do something inside a step."""

    def at_step(step: int, action: Callable[[], None]) -> None:
        compute = loop.forward_backward

        def watched(*arguments):
            if arguments[-1] == step:
                action()
            return compute(*arguments)

        monkeypatch.setattr(loop, "forward_backward", watched)

    return at_step


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the processes that are started, as they are."""
    found = []
    start = Followers._start

    def noted(self: Followers, rank: int):
        process = start(self, rank)
        found.append(process.pid)
        return process

    monkeypatch.setattr(Followers, "_start", noted)
    return found


def test_one_device_needs_no_other_process(started: list[int]):
    with connected(composed()[0], None) as ranks:
        assert ranks is ALONE
    assert not started


def test_ranks_are_ended_where_the_system_starts_no_more(started: list[int], monkeypatch: pytest.MonkeyPatch):
    start = Followers._start

    def refused(self: Followers, rank: int):
        if rank == 2:
            raise OSError(errno.EAGAIN, "Resource temporarily unavailable")
        return start(self, rank)

    monkeypatch.setattr(Followers, "_start", refused)
    with pytest.raises(UserError, match=r"^devices=3: the process of rank 2 could not be started \(Resource temp"):
        Followers(3)
    assert len(started) == 1
    assert not runs(started[0])


def test_a_signal_to_all_processes_does_not_end_a_rank_that_starts():
    """Ctrl-C would end it in its imports, with a traceback."""
    followers = Followers(2)
    try:
        status = Path(f"/proc/{followers._processes[1].pid}/status").read_text()
        masks = [int(line.split()[1], 16) for line in status.splitlines() if line.startswith(("SigBlk:", "SigIgn:"))]
        assert all((masks[0] | masks[1]) >> (number - 1) & 1 for number in SIGNALS)
        assert not signal.pthread_sigmask(signal.SIG_BLOCK, ()) & set(SIGNALS)
    finally:
        followers.kill()


def test_the_others_are_ended_before_a_run_that_has_lost_one_is_saved(tmp_path: Path, started: list[int], monkeypatch):
    """They would end rank 0 in the middle of saving, because it does not answer them."""
    left = []
    save = Recorder.save

    def saved(self, step: int, *arguments, **options) -> bool:
        left.append([process for process in started if runs(process)])
        return save(self, step, *arguments, **options)

    hand_out = Group.hand_out

    def lost_in_second_step(self, step: int, *arguments):
        if step == 2:
            raise RankLostError("rank 1 hangs")
        return hand_out(self, step, *arguments)

    monkeypatch.setattr(Recorder, "save", saved)
    monkeypatch.setattr(Group, "hand_out", lost_in_second_step)
    with pytest.raises(RankLostError, match=r"^rank 1 hangs"):
        run_ranks(tmp_path, *SAVING, "eval.every=null")
    assert left == [[]]


def test_a_rank_that_is_killed_ends_the_run_which_is_saved(tmp_path: Path, at_step, started: list[int]):
    at_step(3, lambda: started and os.kill(started.pop(), signal.SIGKILL))
    with pytest.raises(RankLostError, match=r"^rank 1: its process was killed \(SIGKILL\)"):
        run_ranks(tmp_path / "lost", *SAVING, new_processes=True)
    run_here(tmp_path / "rest", *RUN, "microbatches=2", f"resume={tmp_path / 'lost'}")
    run_here(tmp_path / "whole", *RUN, "microbatches=2")
    last = "checkpoints/step-00000006"
    assert content(tmp_path / "rest" / last) == content(tmp_path / "whole" / last)


@pytest.mark.slow
def test_a_rank_that_hangs_is_named(tmp_path: Path, at_step, started: list[int]):
    groups = []

    def stop() -> None:
        os.kill(started[0], signal.SIGSTOP)
        # Until it has stopped, it might still answer.
        wait_until(lambda: psutil.Process(started[0]).status() == psutil.STATUS_STOPPED, "it has not stopped")
        # Not before: on a busy machine a rank that does not hang takes as long.
        groups[0].messages.timeout_s = 2

    at_step(2, stop)
    with pytest.raises(RankLostError, match=r"^rank 1 hangs: .* parallel.timeout_s=2"):
        run_ranks(tmp_path, *SAVING, "eval.every=null", watch=groups.append, new_processes=True)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000001"]
    assert not runs(started[0])


@pytest.mark.slow
def test_a_signal_saves_the_run_and_ends_all_ranks(tmp_path: Path, at_step, started: list[int]):
    at_step(2, lambda: os.kill(os.getpid(), signal.SIGTERM))
    summary = run_ranks(tmp_path, *SAVING, "eval.every=null", new_processes=True)
    assert (summary["status"], summary["steps"]) == ("stopped", 2)
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]
    assert not runs(started[0])
