"""Runs that are told to stop, two runs in one directory, and what a continued run is in wandb."""

import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.held_run import start_held
from tests.training.helpers.sweeps import wait_for_metrics
from training.errors import UserError


@pytest.fixture
def signalled(monkeypatch: pytest.MonkeyPatch):
    """Returns a function that makes a signal arrive in the middle of a step."""
    from training.run import loop

    def signalled(at: int, times: int = 1) -> None:
        compute = loop.forward_backward

        def interrupted(*arguments):
            for _ in range(times if arguments[-1] == at else 0):
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.01)
            return compute(*arguments)

        monkeypatch.setattr(loop, "forward_backward", interrupted)

    return signalled


def test_a_signal_saves_the_run_after_its_step(tmp_path: Path, finished: Path, run_here, signalled, at, content, curve):
    signalled(at=4)
    stopped = run_here(tmp_path / "stopped")
    assert (stopped["status"], stopped["steps"]) == ("stopped", 4)
    assert stopped["reason"] == f"SIGTERM: resume with resume={at(tmp_path / 'stopped', 4)}"
    assert json.loads((tmp_path / "stopped" / "summary.json").read_text())["status"] == "stopped"
    run_here(tmp_path / "stopped", "resume=auto")
    assert content(at(tmp_path / "stopped", 6)) == content(at(finished, 6))
    assert curve(tmp_path / "stopped") == curve(finished)


@pytest.mark.parametrize(("asked", "worth_saving_s"), [("true", 60.0), ("null", 1e-6)])
def test_a_run_without_checkpoints_saves_itself_if_asked_or_after_a_minute(
    tmp_path: Path, run_here, signalled, monkeypatch, asked: str, worth_saving_s: float
):
    monkeypatch.setattr("training.checkpoints.saving.WORTH_SAVING_S", worth_saving_s)
    signalled(at=2)
    stopped = run_here(tmp_path, "checkpoint.every=null", f"checkpoint.on_signal={asked}")
    assert stopped["status"] == "stopped"
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step-00000002"]


def test_a_stop_that_cannot_be_saved_is_an_error(tmp_path: Path, run_here, signalled, monkeypatch: pytest.MonkeyPatch):
    def full(*arguments):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("training.checkpoints.saving.write_folder", full)
    signalled(at=5)
    with pytest.raises(UserError, match=r"step-00000005 could not be saved \(No space left"):
        run_here(tmp_path)


@pytest.mark.slow
def test_as_a_user_does_it(tmp_path: Path, run_here, at, content):
    """A second run in the directory is refused; SIGTERM ends the first with status 0; another resumes from there."""
    overrides = ["model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=2", "batch_size=4"]
    overrides += ["seq_len=32", "device=cpu", "dataset.max_tokens=20000", "tracking=disabled", "warmup_steps=1"]
    overrides += ["checkpoint.on_signal=true", "log_every=1", "steps=100000", f"hydra.run.dir={tmp_path / 'run'}"]
    metrics = tmp_path / "run" / "metrics.jsonl"
    with open(tmp_path / "output", "w") as output:
        first = start_held(*overrides, stdout=output, stderr=subprocess.STDOUT)
    try:
        wait_for_metrics(first, tmp_path / "run", tmp_path / "output")
        command = [sys.executable, "train.py", *overrides]
        second = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
        assert second.returncode == 1
        assert f"another run writes to this directory (process {first.pid})" in second.stderr
        # All are one request, those too that come when the run is saved and its process ends.
        deadline = time.monotonic() + 300
        while first.poll() is None and time.monotonic() < deadline:
            first.send_signal(signal.SIGTERM)
            time.sleep(0.002)
        assert first.wait(300) == 0, (tmp_path / "output").read_text()
    finally:
        first.kill()
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert "the run ends when this step is done and saved" in (tmp_path / "output").read_text()
    step = summary["steps"]
    steps = (f"steps={step + 1}", "checkpoint.every=1", "log_every=1")
    run_here(tmp_path / "run", "resume=auto", *steps)
    run_here(tmp_path / "whole", *steps, "checkpoint.every=1000")
    assert content(at(tmp_path / "run", step + 1)) == content(at(tmp_path / "whole", step + 1))
    records = [json.loads(line)["train/step"] for line in metrics.read_text().splitlines()]
    assert records == list(range(1, step + 2))


@pytest.mark.slow
def test_a_run_that_resumes_in_its_directory_is_the_same_one_in_wandb(tmp_path: Path, run_here, at):
    run_here(tmp_path / "run", "tracking=offline")
    tracked = json.loads((at(tmp_path / "run", 3) / "state.json").read_text())["tracking_id"]
    run_here(tmp_path / "rest", "tracking=offline", f"resume={at(tmp_path / 'run', 3)}")
    run_here(tmp_path / "run", "tracking=offline", "resume=auto", "steps=7")

    def ids(run_dir: Path) -> set[str]:
        return {folder.name.rpartition("-")[2] for folder in (run_dir / "wandb").glob("offline-run-*")}

    assert ids(tmp_path / "run") == {tracked}
    (other,) = ids(tmp_path / "rest")
    assert other != tracked
