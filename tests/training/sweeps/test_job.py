"""One job of a sweep: time limits, jobs that cannot start, and a sweep that is killed."""

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.training.helpers.in_process import TINY_RUN
from tests.training.helpers.sweeps import (
    Sweep,
    runs,
    start,
    time_is_over,
    wait_for,
    wait_for_end,
    wait_for_metrics,
    wait_until,
    write_script,
)
from training.runs.records import read_metrics, read_summary
from training.sweeps import job as jobs_module
from training.sweeps.job import SweepJob

SAVES = """
trap 'echo "{\\"status\\": \\"stopped\\", \\"reason\\": \\"SIGTERM\\"}" > summary.json; exit 0' TERM
touch ready
kill -$0 $$
sleep 600 & wait
"""
HANGS = "trap '' TERM; echo $$ > pid; touch ready; sleep 600 & wait"
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT)}


def job(directory: Path, timeout_min: float | None = 0.02) -> SweepJob:
    return SweepJob(0, [], directory, timeout_min)


# Alone, and stopped by the terminal or by a debugger.
@pytest.mark.parametrize("first", ["SIGCONT", "SIGSTOP"])
def test_a_job_that_takes_too_long_saves_itself_and_its_row_says_why(tmp_path: Path, monkeypatch, first: str):
    def ready(process: subprocess.Popen) -> bool:
        stopped = psutil.Process(process.pid).status() == psutil.STATUS_STOPPED
        return (tmp_path / "ready").exists() and stopped == (first == "SIGSTOP")

    monkeypatch.setattr(subprocess, "Popen", time_is_over(ready))
    late = job(tmp_path)
    monkeypatch.chdir(tmp_path)
    late.run(["bash", "-c", SAVES, first], ENVIRONMENT)
    assert (late.exit_status, late.succeeded) == (0, False)
    assert late.outcome == ("stopped", "hydra.launcher.timeout_min=0.02 was over: SIGTERM")
    assert read_summary(tmp_path) == {"status": "stopped", "reason": late.outcome[1]}


def test_a_job_that_does_not_react_is_killed_with_all_that_it_started(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("training.sweeps.job.GRACE_S", 0.5)
    monkeypatch.setattr(subprocess, "Popen", time_is_over(lambda process: (tmp_path / "ready").exists()))
    monkeypatch.chdir(tmp_path)
    late = job(tmp_path)
    late.run(["bash", "-c", HANGS], ENVIRONMENT)
    assert late.exit_status == -signal.SIGKILL
    reason = "hydra.launcher.timeout_min=0.02 was over: ended before its step was done and saved"
    assert read_summary(tmp_path) == {"status": "interrupted", "reason": reason}
    assert not runs(int((tmp_path / "pid").read_text()))
    assert "it is to save and end, within 0 s" in capsys.readouterr().out


@pytest.mark.slow
def test_a_job_is_asked_earlier_so_that_it_has_saved_when_its_time_is_over(tmp_path: Path, monkeypatch):
    popen = time_is_over(lambda process: (tmp_path / "ready").exists())
    monkeypatch.setattr(subprocess, "Popen", popen)
    monkeypatch.chdir(tmp_path)
    late = job(tmp_path, timeout_min=0.1)
    late.run(["bash", "-c", SAVES, "SIGCONT"], ENVIRONMENT, early_s=1000)
    # Half of the time is the job's.
    assert popen.limits == [3.0]
    assert late.outcome == ("stopped", "hydra.launcher.timeout_min=0.1 was over: SIGTERM")


def test_a_job_that_nobody_saw_end_is_a_row_unless_there_are_results(tmp_path: Path):
    lost = job(tmp_path / "empty")
    lost.lose("12 ended as NODE_FAIL")
    assert (lost.outcome, lost.refused) == (("killed", "12 ended as NODE_FAIL"), False)
    assert read_summary(tmp_path / "empty") == {"status": "killed", "reason": "12 ended as NODE_FAIL"}
    earlier = {"status": "ok", "perf/step_ms": 1.0}
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "summary.json").write_text(json.dumps(earlier))
    lost = job(tmp_path / "full")
    lost.lose("12 ended as CANCELLED")
    assert (lost.outcome, lost.refused) == (("killed", "12 ended as CANCELLED"), True)
    assert read_summary(tmp_path / "full") == earlier


def test_a_job_whose_process_cannot_start_is_a_row(tmp_path: Path):
    lost = job(tmp_path)
    lost.run([str(tmp_path / "no python")], ENVIRONMENT)
    assert not lost.succeeded
    reason = "its process could not be started (No such file or directory)"
    assert read_summary(tmp_path) == {"status": "failed", "reason": reason}


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_sweep_that_is_killed_takes_its_job_with_it(tmp_path: Path):
    write_script(tmp_path)
    process = start(tmp_path, "-m", "act=save,ok", "note=0", "hydra.sweep.dir=sweep")
    wait_for(tmp_path / "sweep" / "0" / "saves")
    process.kill()
    done = Sweep(process, tmp_path / "sweep")
    # Its output ends a moment before the job does.
    wait_for_end(done.seen(0)["pid"])
    assert done.summary(0) == {"status": "stopped", "reason": "SIGTERM"}
    assert not (tmp_path / "sweep" / "1").exists()


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends a process with its parent")
def test_a_sweep_of_train_py_that_is_killed_is_saved_and_continued(tmp_path: Path):
    """The job that runs is saved; the same command with resume=auto resumes it and runs what is missing."""
    sweep = tmp_path / "sweep"
    overrides = (*TINY_RUN, "dataset=synthetic", "log_every=1", "checkpoint.every=100000", "steps=1000000")
    command = [sys.executable, "train.py", "-m", *overrides, "seed=1,2", f"hydra.sweep.dir={sweep}"]
    with open(tmp_path / "output", "w") as output:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output)
    try:
        wait_for_metrics(process, sweep / "0", tmp_path / "output")
    finally:
        process.kill()
        process.wait(300)
    wait_until((sweep / "0" / "summary.json").exists, "the job has not ended")
    stopped = read_summary(sweep / "0")
    assert stopped["status"] == "stopped", (tmp_path / "output").read_text()
    steps = stopped["steps"] + 2
    subprocess.run([*command, f"steps={steps}", "resume=auto"], cwd=ROOT, check=True, timeout=300)
    for number in ("0", "1"):
        assert read_summary(sweep / number)["status"] == "ok"
        assert [record["train/step"] for record in read_metrics(sweep / number)] == list(range(1, steps + 1))
    assert json.loads((sweep / "0" / "summary.json").read_text())["steps"] == steps


LOG = b"Plan: x\nstep      203 ms for 2,048 tokens\nstep  1/20  loss 3.1  ETA 00:19\nstep 12/20  loss 3.0  ETA 00:08\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_job_is_named_by_what_tells_it_from_the_others():
    jobs = [SweepJob(number, [f"seed={number}", "steps=9", "hydra.verbose=true"], Path()) for number in (4, 5)]
    assert [jobs_module.title_of(job, 1, jobs) for job in jobs] == ["job 4 (1 of 2): seed=4", "job 5 (1 of 2): seed=5"]
    assert jobs_module.title_of(jobs[0], 1, jobs[:1]) == "job 4 (1 of 1): seed=4 steps=9"


@pytest.mark.parametrize(
    ("begin", "shown"), [(0, "step 12/20  ETA 00:08"), (len(LOG), "starting"), (len(LOG) - 40, "step 12/20  ETA 00:08")]
)
def test_progress_is_the_last_logged_step_of_this_job(tmp_path: Path, begin: int, shown: str):
    (tmp_path / "log").write_bytes(LOG)
    assert jobs_module.progress_in(tmp_path / "log", begin) == shown
    assert jobs_module.progress_in(tmp_path / "none", 0) == "starting"


def test_a_job_that_may_not_write_its_reason_has_it_from_its_log(tmp_path: Path):
    job = SweepJob(0, [], tmp_path, log=tmp_path / "log")
    job.log.write_text("error: of an earlier start\n")
    print_and_fail = "print('error: one'); print('error: a/0: another run writes here'); print('more'); exit(1)"
    job.run([sys.executable, "-c", print_and_fail], dict(os.environ))
    assert job.outcome == ("failed", "a/0: another run writes here")
    job = SweepJob(0, [], tmp_path, log=job.log)
    job.run([sys.executable, "-c", "exit(3)"], dict(os.environ))
    assert job.outcome == ("failed", "exit status 3")


def test_a_terminal_has_one_line_that_moves_and_is_gone_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(jobs_module, "LOOK_S", 0.01)
    monkeypatch.setenv("COLUMNS", "50")
    stream, log = Terminal(), tmp_path / "log"
    with jobs_module.following("job 1 (1 of 2): a long title of a job", log, stream):
        log.write_bytes(LOG)
        deadline = time.monotonic() + 60
        while "12/20" not in stream.getvalue():
            assert time.monotonic() < deadline, stream.getvalue()
            time.sleep(0.01)
    *_, last, end = stream.getvalue().replace("\n", "").rstrip("\r").split("\r")
    assert last.rstrip() == "job 1 (1 of 2): a long tit  step 12/20  ETA 00:08"
    assert not end.strip()
    pipe = io.StringIO()
    with jobs_module.following("job 1", log, pipe):
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
    jobs_module.print_ended("t", job, 65.4)
    assert capsys.readouterr().out == line
