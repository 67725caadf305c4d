"""The probe: what it measures on a CPU, and where it is kept."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from tests import ROOT
from tests.training.helpers.in_process import composed
from training.planning.machine import Figures, figures_of
from training.planning.probe import keep, kept, kept_path, probe

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def planning_config() -> Iterator[DictConfig]:
    with composed() as config:
        yield config


def test_a_cpu_is_measured_in_seconds():
    start = time.perf_counter()
    figures = Figures(**probe(CPU))
    assert time.perf_counter() - start < 60, "a few seconds on an idle machine"
    assert figures.vram_gib is None
    assert min(figures.h2d_gb_s, figures.both_gb_s, figures.host_gib, figures.cores) > 0.05
    assert 1e-3 < figures.fp32_tflops < 100
    assert 1e-3 < figures.update_gparams_s < 100


def test_figures_are_kept_by_the_name_of_the_device(cache: Path):
    assert kept(CPU) is None
    path = keep(CPU, {"name": "this one", "cores": 2})
    assert path == kept_path(CPU)
    assert (path.parent, path.name[:6]) == (cache / "offload-training", "probe-")
    assert kept(CPU) == {"name": "this one", "cores": 2}
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("content", ["", "{", "[1]", "{}", '{"nam'])
def test_a_damaged_file_counts_as_none(content: str):
    keep(CPU, {"name": "x"}).write_text(content)
    assert kept(CPU) is None


def test_the_script_keeps_what_a_plan_then_takes(tmp_path: Path):
    script = subprocess.run(
        [sys.executable, "scripts/probe.py", "--device=cpu"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert script.returncode == 0, script.stderr
    figures = kept(CPU)
    assert f"update_gparams_s   {figures['update_gparams_s']:g}" in script.stdout
    assert str(kept_path(CPU)) in script.stdout
    command = [sys.executable, "train.py", "plan=true", "hardware=measured", "device=cpu", "seq_len=16"]
    plan = subprocess.run(
        [*command, f"hydra.run.dir={tmp_path / 'run'}"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert plan.returncode == 0, plan.stderr
    assert f"{figures['name']} (kept by the probe)" in plan.stdout
    assert "no GPU here" in plan.stdout


def test_figures_of_another_version_are_measured_again(planning_config):
    keep(CPU, {"name": "old", "h2d_gb_s": 1.0})
    assert figures_of(planning_config, CPU).source == "measured in short"
