"""What a sweep shows of its jobs."""

from __future__ import annotations

import io
import time
from pathlib import Path

import pytest

from training.sweeps import terminal
from training.sweeps.job import SweepJob

LOG = b"Plan: x\nstep      203 ms for 2,048 tokens\nstep  1/20  loss 3.1  ETA 00:19\nstep 12/20  loss 3.0  ETA 00:08\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_job_is_named_by_what_tells_it_from_the_others():
    jobs = [SweepJob(number, [f"seed={number}", "steps=9", "hydra.verbose=true"], Path()) for number in (4, 5)]
    assert [terminal.title_of(job, 1, jobs) for job in jobs] == ["job 4 (1 of 2): seed=4", "job 5 (1 of 2): seed=5"]
    assert terminal.title_of(jobs[0], 1, jobs[:1]) == "job 4 (1 of 1): seed=4 steps=9"


@pytest.mark.parametrize(
    ("begin", "shown"),
    [(0, "step 12/20  ETA 00:08"), (len(LOG), "starting"), (len(LOG) - 40, "step 12/20  ETA 00:08")],
)
def test_progress_is_the_last_logged_step_of_this_job(tmp_path: Path, begin: int, shown: str):
    (tmp_path / "log").write_bytes(LOG)
    assert terminal.progress_in(tmp_path / "log", begin) == shown
    assert terminal.progress_in(tmp_path / "none", 0) == "starting"


def test_a_terminal_has_one_line_that_moves_and_is_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(terminal, "LOOK_S", 0.01)
    monkeypatch.setenv("COLUMNS", "50")
    stream, log = Terminal(), tmp_path / "log"
    with terminal.following("job 1 (1 of 2): a long title of a job", log, stream):
        log.write_bytes(LOG)
        deadline = time.monotonic() + 60
        while "12/20" not in stream.getvalue():
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.01)
    *_, last, end = stream.getvalue().replace("\n", "").rstrip("\r").split("\r")
    assert last.rstrip() == "job 1 (1 of 2): a long tit  step 12/20  ETA 00:08"
    assert not end.strip()
    pipe = io.StringIO()
    with terminal.following("job 1", log, pipe):
        pass
    assert not pipe.getvalue()


@pytest.mark.parametrize(
    ("status", "summary", "line"),
    [
        (0, {"train/final_loss": 2.5, "perf/step_ms": 1234.5}, "t: ok in 01:05, loss 2.5000, 1,234.5 ms a step\n"),
        (0, {"status": "planned"}, "t: planned in 01:05\n"),
        (1, {"status": "refused", "reason": "too large"}, "t: refused: too large; log: a/console.log\n"),
    ],
)
def test_a_job_that_has_ended_is_one_line(capsys: pytest.CaptureFixture[str], status: int, summary: dict, line: str):
    job = SweepJob(1, [], Path("a"), exit_status=status, summary=summary, log=Path("a/console.log"))
    terminal.print_ended("t", job, 65.4)
    assert capsys.readouterr().out == line
