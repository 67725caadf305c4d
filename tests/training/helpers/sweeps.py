"""A script like train.py without a model, and sweeps of it."""

import csv
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import psutil

from tests import ROOT

# A script like train.py without a model; `act` chooses what the job does to itself.
SCRIPT = """
import json, os, signal, subprocess, sys, time
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import OmegaConf

from training.sweeps import cluster
from training.sweeps import launcher
from training.errors import UserError
from training.runs import compose_errors
from training.runs.failures import failures_recorded
from training.runs.records import write_summary
from training.runs import signals
from training.runs.signals import end_with_parent
from training.runs.signals import StopRequest

launcher.register_launcher()
cluster.register_launcher()
signals.SAME_REQUEST_S = float(os.environ.get("SAME_REQUEST_S", signals.SAME_REQUEST_S))


def tell(path, what):
    # Whole or absent for who waits for it.
    path.with_suffix(".partial").write_text(json.dumps(what))
    path.with_suffix(".partial").rename(path)


@hydra.main(version_base="1.3", config_path="settings", config_name="wrong")
def main(config):
    job = HydraConfig.get()
    run_dir = Path(job.runtime.output_dir)
    if config.act == "early":
        os._exit(4)
    earlier = (run_dir / "seen.json").exists()
    OmegaConf.save(config, run_dir / "config.yaml")
    with failures_recorded(run_dir):
        seen = {
            "pid": os.getpid(),
            # A process that a job starts and does not end, as a tracking service or a data worker.
            "started": subprocess.Popen(["sleep", "600"]).pid if config.act == "sleep" else None,
            "parent": os.getppid(),
            "group": os.environ["OFFLOAD_SWEEP_GROUP"],
            "label": os.environ["OFFLOAD_SWEEP_LABEL"],
            "wandb_dir": os.environ["WANDB_DIR"],
            "number": job.job.num,
            "kind": job.runtime.choices.kind,
            "note": config.note,
            "warnings": sys.warnoptions,
            "torch": "torch" in sys.modules,
        }
        tell(run_dir / "seen.json", seen)
        if config.act == "raise" or (config.act == "once" and not earlier):
            raise ValueError("a broken [job]")
        if config.act == "refuse":
            raise UserError("act=refuse: take another")
        if config.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.act == "sleep":
            time.sleep(600)
        if config.act == "save":
            with StopRequest(after_s=0.0) as stop:
                tell(run_dir / "saves", {})
                while stop.signal is None:
                    time.sleep(0.01)
                tell(run_dir / "saving", {})
                time.sleep(float(config.note))
                stop.settle()
                write_summary(run_dir, {"status": "stopped", "reason": stop.signal})
                return
        summary = {"status": "ok", "perf/step_ms": 12.345, "memory/vram_peak_gib": 1.5}
        write_summary(run_dir, {**summary, "reason": None})
        if config.act == "exit":
            os._exit(3)


if __name__ == "__main__":
    end_with_parent()
    compose_errors.run(main)
"""

CONFIG = """
defaults:
  - kind: plain
  - _self_
  - override hydra/launcher: process
act: ok
note: ""
steps: 6
resume: null
hydra:
  output_subdir: null
"""


def write_script(folder, begin=""):
    (folder / "settings" / "kind").mkdir(parents=True)
    (folder / "script.py").write_text(begin + SCRIPT)
    (folder / "settings" / "config.yaml").write_text(CONFIG)
    (folder / "settings" / "kind" / "plain.yaml").write_text("color: grey\n")
    # A folder that --config-dir names, with an option that the script's own folder does not have.
    (folder / "more" / "kind").mkdir(parents=True)
    (folder / "more" / "kind" / "special.yaml").write_text("color: red\n")


def start(folder, *arguments, python=(), environment=None, **options):
    command = [sys.executable, *python, "script.py", "--config-name", "config", *arguments]
    return subprocess.Popen(
        command,
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | (environment or {}),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def name(path):
    return Path(path).name


class Sweep:
    """A finished sweep: what it printed and what its jobs saw."""

    def __init__(self, process, directory):
        self.stdout, self.stderr = process.communicate(timeout=600)
        self.exit_status = process.returncode
        self.pid = process.pid
        self.directory = directory

    def seen(self, number):
        return json.loads((self.directory / str(number) / "seen.json").read_text())

    def summary(self, number):
        return json.loads((self.directory / str(number) / "summary.json").read_text())

    def row(self, number):
        """Returns the row of this job in the comparison at the end of the sweep."""
        with open(self.directory / "compare.csv", newline="") as file:
            (row,) = [row for row in csv.DictReader(file) if str(number) in map(name, row["directories"].split(";"))]
        return row


def runs(pid):
    with suppress(psutil.NoSuchProcess):
        # A killed process stays listed until the machine's first process takes note of its end.
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def wait_until(condition, what):
    """Waits for as long as a busy machine may take; fails with `what`."""
    deadline = time.monotonic() + 300
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


def wait_for(path):
    wait_until(path.exists, f"{path} was not written")
    return json.loads(path.read_text())


def wait_for_end(pid):
    """Waits for the end of a process; one that was killed takes a moment to end."""
    wait_until(lambda: not runs(pid), f"process {pid} still runs")


def wait_for_metrics(process, run_dir, console):
    """Waits until the run of `process` has logged a step; fails with the text of the file `console`."""
    metrics = run_dir / "metrics.jsonl"

    def is_logged():
        assert process.poll() is None, console.read_text()
        return metrics.exists() and metrics.stat().st_size

    wait_until(is_logged, f"{metrics} was not written")


def time_is_over(ready):
    """Returns a class in place of Popen: the time of a job is over once `ready` says so of its process, or it ends.

    Otherwise a busy machine decides how far a job is by then. The class has the limits that it was given as `limits`.
    """

    class LimitedPopen(subprocess.Popen):
        limits: ClassVar[list[float]] = []
        is_over = False

        def wait(self, timeout=None):
            if timeout is None or self.is_over:
                return super().wait(timeout)
            self.limits.append(timeout)
            wait_until(lambda: ready(self) or self.poll() is not None, "the job is not ready")
            if self.returncode is not None:
                return self.returncode
            self.is_over = True
            raise subprocess.TimeoutExpired(self.args, timeout)

    return LimitedPopen
