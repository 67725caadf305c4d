"""Runs that are killed without warning, at moments that nobody chose."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT

# How often the run is killed: 30 take two minutes.
KILLS = int(os.environ.get("OFFLOAD_TEST_KILLS", "5"))
PROGRAM = Path(__file__).with_name("kill_runs.py")


def test_no_step_is_lost_or_repeated(tmp_path: Path, at, content, curve):
    steps = 10 * KILLS
    overrides = ["model.hidden_size=16", "model.intermediate_size=32", "model.num_hidden_layers=2", "device=cpu"]
    overrides += ["dataset=synthetic", "batch_size=4", "seq_len=32", "tracking=disabled", "warmup_steps=1"]
    overrides += ["clip_norm=null", f"steps={steps}", "log_every=1", "resume=auto", "hardware=h200"]
    for name, kills, every in (("killed", KILLS, 1), ("whole", 0, steps)):
        runs = subprocess.run(
            [sys.executable, PROGRAM, tmp_path / name, str(kills), "0", *overrides, f"checkpoint.every={every}"],
            env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=60 * (KILLS + 2),
        )
        print(runs.stdout)
        assert runs.returncode == 0, runs.stderr
    assert content(at(tmp_path / "killed", steps)) == content(at(tmp_path / "whole", steps))
    assert curve(tmp_path / "killed") == curve(tmp_path / "whole")
    assert len(list((tmp_path / "killed" / "checkpoints").iterdir())) == 2
