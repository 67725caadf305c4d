"""The program that traces one step, run on the CPU."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from scripts.trace import main
from tests import ROOT
from tests.training.helpers.in_process import hydra_as_before
from training.profiling.timeline import read_timeline
from training.runs import compose_errors


@pytest.mark.slow
def test_a_step_is_traced_and_drawn(tmp_path: Path):
    shape = ["--hidden=64", "--intermediate=128", "--heads=4", "--blocks=2", "--seq-len=16", "--sequences=1"]
    command = [sys.executable, "scripts/trace.py", "--device=cpu", *shape, "--optimizer", "--mode=layer_stream:slots=2"]
    result = subprocess.run(
        [*command, f"--out={tmp_path}"], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
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


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        (["--mode=layer_stream:slots=0"], "error: offload.slots=0: must be at least 1"),
        (["--model=nope"], "error: model=nope: there is no such option; choose from "),
        (["--model=tiny", "--set", "nope=3"], "error: nope: unknown key. "),
        (["--out=FILE/traces"], "error: --out FILE/traces: Not a directory; choose another place"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, monkeypatch, capsys, wrong: list[str], line: str):
    (tmp_path / "FILE").touch()
    monkeypatch.chdir(tmp_path)
    shape = ["--device=cpu", "--hidden=16", "--heads=2", "--blocks=2", "--seq-len=16", "--out=traces"]
    monkeypatch.setattr("sys.argv", ["scripts/trace.py", *shape, *wrong])
    with hydra_as_before(), pytest.raises(SystemExit) as end:
        compose_errors.run(main)
    assert end.value.code == 1
    shown = capsys.readouterr()
    assert shown.err.startswith(line)
    assert shown.err.count("\n") == 1
    assert not (tmp_path / "traces").exists()
