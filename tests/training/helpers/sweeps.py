"""A script like train.py without a model, and sweeps of it."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

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
from training.metrics.files import write_summary
from training.runs.parent import end_with_parent
from training.runs.signals import StopRequest

launcher.register_launcher()
cluster.register_launchers()


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
            "started": subprocess.Popen(["sleep", "60"]).pid if config.act == "sleep" else None,
            "parent": os.getppid(),
            "group": os.environ["OFFLOAD_SWEEP_GROUP"],
            "number": job.job.num,
            "kind": job.runtime.choices.kind,
            "note": config.note,
            "warnings": sys.warnoptions,
            "torch": "torch" in sys.modules,
        }
        (run_dir / "seen.partial").write_text(json.dumps(seen))
        (run_dir / "seen.partial").rename(run_dir / "seen.json")
        if config.act == "raise" or (config.act == "once" and not earlier):
            raise ValueError("a broken [job]")
        if config.act == "refuse":
            raise UserError("act=refuse: take another")
        if config.act == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if config.act == "sleep":
            time.sleep(60)
        if config.act == "save":
            with StopRequest(after_s=0.0) as stop:
                while stop.signal is None:
                    time.sleep(0.01)
                (run_dir / "saving").write_text("{}")
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


def write_script(folder):
    (folder / "settings" / "kind").mkdir(parents=True)
    (folder / "script.py").write_text(SCRIPT)
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


def wait_for(path):
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} was not written"
        time.sleep(0.02)
    return json.loads(path.read_text())
