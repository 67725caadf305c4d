"""Sweeps: a process a job, and what a job does to itself stays with it."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from hydra.core.utils import JobStatus
from omegaconf import OmegaConf

from tests import ROOT
from tests.training.helpers.in_process import command_here
from tests.training.helpers.sweeps import Sweep, runs, start, wait_for, wait_for_end, write_script
from training.errors import UserError
from training.runs.signals import SAME_REQUEST_S
from training.sweeps.job import SweepJob
from training.sweeps.launcher import _job_returns


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    # A directory whose name Hydra's grammar would take apart, were it not quoted.
    folder = tmp_path_factory.mktemp("a=b, {c}")
    write_script(folder)
    directory = folder / "multirun" / "2031-01-02, it's" / "03-04-05"
    # Left by earlier sweeps in directories where this one's jobs write nothing: results, and a reason of failure.
    for number, summary in ((6, {"status": "ok", "perf/step_ms": 99.0}), (7, {"status": "failed", "reason": "old"})):
        (directory / str(number)).mkdir(parents=True)
        (directory / str(number) / "summary.json").write_text(json.dumps(summary))
    process = start(
        folder,
        "--config-dir=more",
        "-m",
        "act=ok,raise,kill,refuse,exit,ok,early,early",
        "kind=special",
        "note='[a, b]'",
        f"hydra.sweep.dir='{str(directory).replace(chr(39), chr(92) + chr(39))}'",
        python=("-W", "ignore::ImportWarning"),
    )
    return Sweep(process, directory)


def test_a_sweep_under_torchrun_is_refused_before_its_first_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}.items():
        monkeypatch.setenv(name, value)
    done = command_here("-m", "seed=1,2", f"hydra.sweep.dir={tmp_path / 'sweep'}")
    assert done.returncode == 1
    assert done.stderr.startswith("error: a sweep (-m) under torchrun, with 2 processes: leave torchrun out")
    assert not (tmp_path / "sweep").exists()


def test_every_job_has_a_fresh_process_and_is_the_same_command_as_the_sweep(sweep):
    jobs = [sweep.seen(number) for number in range(6)]
    assert len({job["pid"] for job in jobs} | {sweep.pid}) == 7
    assert {job["parent"] for job in jobs} == {sweep.pid}
    assert {job["group"] for job in jobs} == {"2031-01-02, it's-03-04-05"}
    assert [job["label"] for job in jobs[1:5]] == ["act=raise", "act=kill", "act=refuse", "act=exit"]
    assert {job["wandb_dir"] for job in jobs} == {str(sweep.directory)}
    assert not any(job["torch"] for job in jobs)
    for number, job in enumerate(jobs):
        assert (job["number"], job["kind"], job["note"]) == (number, "special", "[a, b]")
        assert "ignore::ImportWarning" in job["warnings"]


def test_the_comparison_shows_how_each_job_ended(sweep):
    columns = ("name", "status", "why", "step_ms", "vram_peak_gib")
    rows = [tuple(sweep.row(number)[column] for column in columns) for number in (0, 1, 2, 3, 4)]
    assert rows == [
        ("act=ok", "ok", "", "12.345", "1.5"),
        ("act=raise", "failed", "ValueError: a broken [job]", "", ""),
        ("act=kill", "killed", "SIGKILL, as the kernel does when the host is out of memory", "", ""),
        ("act=refuse", "failed", "act=refuse: take another", "", ""),
        ("act=exit", "failed", "exit status 3", "12.345", "1.5"),
    ]
    # A job that ends badly does not stop the others.
    assert sweep.summary(5)["status"] == "ok"
    lines = sweep.stdout.splitlines()
    log = f"log: {sweep.directory / '1' / 'console.log'}"
    assert lines[0].startswith("job 0 (1 of 8): act=ok: ok in 00:")
    assert lines[0].endswith(", 12.3 ms a step")
    assert lines[1] == f"job 1 (2 of 8): act=raise: failed: ValueError: a broken [job]; {log}"
    assert [line.split(":")[0] for line in lines[:8]] == [f"job {number} ({number + 1} of 8)" for number in range(8)]
    lines = [line.split() for line in lines]
    assert any(line[:2] == ["act=ok", "12.3"] for line in lines)
    assert "act=raise: failed: ValueError: a broken [job]" in sweep.stdout.splitlines()


def test_a_job_that_cannot_say_how_it_ended_has_it_written_down(sweep):
    assert sweep.summary(2)["status"] == "killed"
    assert sweep.summary(4) == {
        "status": "failed",
        "reason": "exit status 3",
        "perf/step_ms": 12.345,
        "memory/vram_peak_gib": 1.5,
    }


def test_the_results_of_an_earlier_sweep_are_kept_but_not_its_failure(sweep):
    assert (sweep.row(7)["why"], sweep.row(7)["step_ms"]) == ("exit status 4", "")
    assert sweep.summary(6) == {"status": "ok", "perf/step_ms": 99.0}
    kept = f"{sweep.directory / '6'} has an earlier run, which is left as it was"
    assert f"job 6: failed: exit status 4; {kept}" in sweep.stdout.splitlines()


def test_a_sweep_with_failed_jobs_ends_non_zero_and_names_them(sweep):
    logs = [(sweep.directory / str(number) / "console.log").read_text().splitlines() for number in range(8)]
    assert "Traceback (most recent call last):" in logs[1]
    assert "error: act=refuse: take another" in logs[3]
    assert (sweep.stderr.count("\n"), sweep.exit_status) == (1, 1)
    assert "Error executing job" not in sweep.stderr
    line = sweep.stderr.splitlines()[-1]
    assert line.startswith("error: job 1 failed: ValueError: a broken [job]; job 2 killed: SIGKILL")
    assert line.endswith(
        "; job 3 failed: act=refuse: take another; job 4 failed: exit status 3; jobs 6, 7 failed: exit status 4"
    )


@pytest.mark.parametrize(
    ("override", "directory"),
    [
        ("hydra.sweep.subdir=${hydra.job.override_dirname}", "act=ok,note=a"),
        ("hydra.sweep.subdir=job_${hydra.job.num}", "job_0"),
        ("++hydra.sweep.subdir=job_${hydra.job.num}", "job_0"),
        ("hydra.job.name=${hydra.job.num}", "0"),
    ],
)
@pytest.mark.slow
def test_a_job_is_told_its_directory_and_resolves_what_else_refers_to_others(tmp_path, override, directory):
    write_script(tmp_path)
    done = Sweep(start(tmp_path, "-m", "act=ok", "note=a", override, "hydra.sweep.dir=sweep"), tmp_path / "sweep")
    assert done.exit_status == 0, done.stderr
    assert done.seen(directory)["note"] == "a"


def test_a_sweep_that_does_not_compose_starts_no_job(tmp_path):
    write_script(tmp_path)
    done = Sweep(start(tmp_path, "-m", "kind=plain,other", "hydra.sweep.dir=sweep"), tmp_path / "sweep")
    assert done.exit_status == 1
    assert done.stderr == "error: kind=other: there is no such option; choose from plain\n"
    assert not (done.directory / "0").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
@pytest.mark.slow
def test_an_interrupted_sweep_takes_its_job_with_it(tmp_path, number):
    write_script(tmp_path)
    process = start(tmp_path, "-m", "act=sleep,ok", "hydra.sweep.dir=sweep")
    seen = wait_for(tmp_path / "sweep" / "0" / "seen.json")
    process.send_signal(number)
    done = Sweep(process, tmp_path / "sweep")
    assert done.exit_status == 130
    assert done.summary(0) == {"status": "interrupted", "reason": "interrupted"}
    assert done.row(0)["status"] == "interrupted"
    assert "not run, because the sweep was interrupted: 1" in done.stdout.splitlines()
    assert "Traceback" not in done.stderr
    assert not runs(seen["pid"])
    wait_for_end(seen["started"])


@pytest.mark.slow
def test_the_second_request_kills_the_job_and_the_sweep_says_that_it_did(tmp_path):
    write_script(tmp_path)
    process = start(tmp_path, "-m", "act=save,ok", "note=600", "hydra.sweep.dir=sweep")
    wait_for(tmp_path / "sweep" / "0" / "saves")
    process.send_signal(signal.SIGTERM)
    wait_for(tmp_path / "sweep" / "0" / "saving")
    time.sleep(SAME_REQUEST_S)
    process.send_signal(signal.SIGTERM)
    done = Sweep(process, tmp_path / "sweep")
    assert done.exit_status == 130
    assert done.summary(0) == {"status": "interrupted", "reason": "ended before its step was done and saved"}
    assert not runs(done.seen(0)["pid"])


def test_the_folder_of_the_program_takes_no_sweep():
    before = set(os.listdir(ROOT))
    done = command_here("-m", "seed=1,2", "hydra.sweep.dir=.")
    assert (
        done.stderr
        == "error: .: the folder of this program: choose a directory of its own, hydra.sweep.dir=multirun/NAME\n"
    )
    assert set(os.listdir(ROOT)) == before


def test_the_reference_runs_first(tmp_path: Path):
    write_script(tmp_path)
    (tmp_path / "settings" / "offload").mkdir()
    for option in ("none", "other"):
        (tmp_path / "settings" / "offload" / f"{option}.yaml").write_text("{}\n")
    done = Sweep(start(tmp_path, "-m", "+offload=other,none", "hydra.sweep.dir=sweep"), tmp_path / "sweep")
    order = [line.partition(": ok")[0] for line in done.stdout.splitlines()[:2]]
    assert order == ["job 1 (1 of 2): +offload=none", "job 0 (2 of 2): +offload=other"]


def test_sweepers_get_summaries_and_exceptions():
    config = OmegaConf.create({"hydra": {"job": {"name": "train"}}, "seed": 1})
    jobs = [
        SweepJob(0, ["seed=1"], Path("0"), exit_status=0, summary={"train/final_loss": 2.5}),
        SweepJob(1, ["seed=2"], Path("1"), exit_status=-signal.SIGKILL),
        SweepJob(2, ["seed=3"], Path("2"), exit_status=1, summary={"status": "planned", "reason": "too large"}),
        SweepJob(3, ["seed=4"], Path("3"), exit_status=1, summary={"status": "planned", "reason": "too large"}),
    ]
    good, bad, *_ = _job_returns(jobs, [config] * 4)
    assert good.return_value == {"train/final_loss": 2.5}
    assert (good.overrides, good.cfg, good.task_name) == (["seed=1"], {"seed": 1}, "train")
    assert bad.status is JobStatus.FAILED
    with pytest.raises(UserError, match=r"^job 1 killed: SIGKILL, .* of memory; jobs 2, 3 do not fit: too large$"):
        _ = bad.return_value


def test_without_resume_a_sweep_does_not_begin_in_the_directory_of_an_earlier_one(tmp_path):
    write_script(tmp_path)
    earlier = tmp_path / "sweep" / "1"
    earlier.mkdir(parents=True)
    (earlier / "metrics.jsonl").write_text('{"train/step": 1}\n')
    done = Sweep(start(tmp_path, "-m", "act=ok,once", "hydra.sweep.dir=sweep"), tmp_path / "sweep")
    assert (done.exit_status, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("error: sweep/1 has a run of an earlier sweep: resume=auto runs what is missing")
    assert not (tmp_path / "sweep" / "0").exists()


@pytest.mark.slow
def test_what_is_missing_of_a_sweep_is_run_and_nothing_else(tmp_path):
    write_script(tmp_path)
    command = ("-m", "act=ok,once,ok", "hydra.sweep.dir=sweep")
    first = Sweep(start(tmp_path, *command), tmp_path / "sweep")
    assert first.exit_status == 1
    pids = [first.seen(number)["pid"] for number in range(3)]
    (tmp_path / "sweep" / "2" / "summary.json").unlink()
    again = Sweep(start(tmp_path, *command, "resume=auto"), tmp_path / "sweep")
    assert again.exit_status == 0, again.stderr
    assert [again.seen(number)["pid"] == pid for number, pid in enumerate(pids)] == [True, False, False]
    assert [again.row(number)["status"] for number in range(3)] == ["ok"] * 3
    assert again.stdout.count("finished earlier, and not run again") == 1


@pytest.mark.parametrize(
    ("overrides", "changed"),
    [
        (("act=once,ok",), "act: was ok, is once"),
        (("act=ok,once", "note=new"), "note: was , is new"),
        (("act=ok,once", "kind=special"), "kind.color: was grey, is red"),
    ],
)
@pytest.mark.slow
def test_another_sweep_is_not_mixed_with_the_one_in_its_directory(tmp_path, overrides, changed):
    write_script(tmp_path)
    Sweep(start(tmp_path, "-m", "act=ok,once", "hydra.sweep.dir=sweep"), tmp_path / "sweep")
    before = {path: path.read_bytes() for path in (tmp_path / "sweep").glob("[01]/*")}
    command = ("--config-dir=more", "-m", *overrides, "resume=auto", "hydra.sweep.dir=sweep")
    done = Sweep(start(tmp_path, *command), tmp_path / "sweep")
    assert done.exit_status == 1
    assert done.stderr.startswith(f"error: resume=auto: sweep/0 has a run of another sweep, {changed}: give the")
    assert done.stderr.count("\n") == 1
    assert {path: path.read_bytes() for path in (tmp_path / "sweep").glob("[01]/*")} == before
