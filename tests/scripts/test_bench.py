"""The benchmark: floors against values by hand, a run on the CPU, modes by their names."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from scripts.bench import build_mode, weight_modes, with_floor
from tests import ROOT
from training.config.modes import mode_options
from training.errors import UserError

SPEED = {"h2d": 50.0, "d2h": 40.0, "both": 30.0}


def row(step_ms: float, bytes_in: float, bytes_out: float, forward: float) -> dict:
    return {"mode": "m", "step_ms": step_ms, "h2d_bytes": bytes_in, "d2h_bytes": bytes_out, "forward_bytes": forward}


def test_the_floor_is_the_slowest_part():
    found = with_floor(row(600.0, 20e9, 8e9, 10e9), resident_ms=300.0, speed=SPEED)
    assert (found["floor_ms"], found["bound"], found["ratio"]) == (400.0, "h2d", 1.5)
    # Forward: 10 GB at 50. Backward: 8 GB each way at 30, then 2 GB in at 50.
    assert found["phase_ratio"] == pytest.approx(600 / (200 + 8e3 / 30 + 40))
    found = with_floor(row(600.0, 20e9, 8e9, 10e9), resident_ms=500.0, speed=SPEED)
    assert (found["bound"], found["ratio"]) == ("compute", 1.2)
    assert with_floor(row(600.0, 1e9, 8e9, 1e9), None, SPEED)["bound"] == "d2h"


def test_a_run_compares_modes_and_names_what_failed(tmp_path: Path):
    shape = ["--hidden=64", "--intermediate=128", "--heads=4", "--blocks=2", "--seq-len=16", "--steps=2"]
    modes = ["none", "layer_stream", "layer_stream:slots=0"]
    command = [sys.executable, "scripts/bench.py", "--device", "cpu", *shape, "--json", tmp_path / "b.json", "--modes"]
    result = subprocess.run([*command, *modes], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "failed: UserError: offload.slots=0: must be at least 1" in result.stdout
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert rows[1]["h2d_bytes"] > 0 == rows[0]["h2d_bytes"]


def test_any_mode_is_built_by_its_name_with_its_knobs():
    for name in mode_options():
        assert build_mode(name)[0] == name
    _, mode = build_mode("layer_stream:slots=2,resident=60%")
    assert (type(mode), mode.slots, mode.resident) == (LayerStream, 2, "60%")
    _, mode = build_mode("tensor_swap:weights=bounce_linear,weights.slots=5,budget=auto")
    assert (type(mode.weights), mode.weights.slots, mode.budget) == (BounceLinear, 5, "auto")
    with pytest.raises(UserError, match=r"^offload\.weights\.slots=0: must be at least 1"):
        build_mode("layer_stream_swap:weights.slots=0")


def test_without_names_all_modes_of_weights_are_measured():
    assert set(weight_modes()) >= {"none", "bounce_linear", "layer_stream", "shard_offload"}
    assert not {"tensor_swap", "save_on_cpu", "layer_stream_swap"} & set(weight_modes())
