"""The probe: what it measures on a CPU, and where it is kept."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.training.helpers.time_limit import time_limit
from training.errors import UserError
from training.planning.machine import Machine
from training.planning.probe import keep, kept, kept_path

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_values_are_kept_by_the_name_of_the_device(cache: Path):
    assert kept(CPU) is None
    path = keep(CPU, {"name": "this one", "host_gib": 2})
    assert path == kept_path(CPU)
    assert (path.parent, path.name[:6]) == (cache / "offload-training", "probe-")
    assert kept(CPU) == {"name": "this one", "host_gib": 2}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(
    "content",
    ["", "{", "[1]", "{}", '{"nam', '{"name": "x", "both_gb_s": "9"}', '{"name": "x", "both_gb_s": -1}', '{"name": 3}'],
)
def test_a_damaged_file_counts_as_none(content: str):
    keep(CPU, {"name": "x"}).write_text(content)
    assert kept(CPU) is None


def test_a_pipe_counts_as_none():
    kept_path(CPU).parent.mkdir()
    os.mkfifo(kept_path(CPU))
    with time_limit(20):
        assert kept(CPU) is None


def test_without_a_home_directory_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", home)
    assert kept(CPU) is None
    with pytest.raises(UserError, match=r"HOME is not set.*: set XDG_CACHE_HOME to"):
        keep(CPU, {"name": "x"})


@pytest.mark.slow
def test_the_script_keeps_what_a_plan_then_takes(tmp_path: Path):
    script = subprocess.run(
        [sys.executable, "scripts/probe.py", "--device=cpu"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert script.returncode == 0, script.stderr
    values = kept(CPU)
    machine = Machine(**values)
    assert machine.vram_gib is None
    assert min(machine.h2d_gb_s, machine.both_gb_s, machine.host_gib) > 0.05
    assert 1e-3 < machine.fp32_tflops < 100
    assert 1e-3 < machine.update_gparams_s < 100
    assert f"update_gparams_s   {values['update_gparams_s']:g}" in script.stdout
    assert str(kept_path(CPU)) in script.stdout
    command = [sys.executable, "train.py", "plan=true", "hardware=measured", "device=cpu", "seq_len=16"]
    plan = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    assert plan.returncode == 0, plan.stderr
    assert f"{values['name']} (kept by the probe)" in plan.stdout
    assert "no GPU here" in plan.stdout
