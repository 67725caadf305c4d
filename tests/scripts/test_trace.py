"""The program that traces one step, run on the CPU."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.trace import main
from tests import ROOT
from training.profiling.timeline import read_timeline


@pytest.mark.slow
def test_a_step_is_traced_and_drawn(tmp_path: Path):
    shape = ["--hidden=64", "--intermediate=128", "--heads=4", "--blocks=2", "--seq-len=16", "--sequences=1"]
    command = [sys.executable, "scripts/trace.py", "--device=cpu", *shape, "--optimizer", "--mode=layer_stream:slots=2"]
    result = subprocess.run([*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert result.stdout.startswith("layer_stream:slots=2: step ")
    timeline = read_timeline(tmp_path / "layer_stream_slots_2.json.gz")
    assert {work.lane for work in timeline.intervals} == {"copy in", "compute", "copy out", "host update"}
    assert (tmp_path / "layer_stream_slots_2.png").read_bytes().startswith(b"\x89PNG")


def test_a_missing_gpu_is_one_line(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["scripts/trace.py", f"--out={tmp_path / 'traces'}"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == "error: --device cuda: torch finds no GPU; use --device cpu, which shows the order only"
    assert capsys.readouterr().out == ""
    assert not (tmp_path / "traces").exists()


def test_a_mode_that_cannot_be_built_is_one_line(tmp_path: Path, monkeypatch):
    arguments = ["--device=cpu", "--hidden=16", "--heads=2", "--blocks=2", "--mode=layer_stream:slots=0"]
    monkeypatch.setattr("sys.argv", ["scripts/trace.py", *arguments, f"--out={tmp_path / 'traces'}"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code.startswith("error: offload.slots=0: must be at least 1")
    assert not (tmp_path / "traces").exists()


def test_a_place_that_cannot_be_written_is_one_line(tmp_path: Path, monkeypatch):
    (tmp_path / "file").touch()
    shape = ["--device=cpu", "--hidden=16", "--heads=2", "--blocks=2", "--seq-len=16"]
    monkeypatch.setattr("sys.argv", ["scripts/trace.py", *shape, f"--out={tmp_path / 'file' / 'traces'}"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == f"error: --out {tmp_path / 'file' / 'traces'}: Not a directory; choose another place"
