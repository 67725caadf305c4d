"""The benchmark: ratios against values by hand, a run on the CPU, modes by their names."""

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path

import pytest

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.planning.simulated_streams import Bandwidth
from scripts.bench import rows_of, with_ratios
from scripts.workload import build_mode
from tests import ROOT
from training.config.modes import mode_options
from training.errors import UserError


def test_a_step_is_compared_with_the_bus_and_the_resident_step():
    row = {"mode": "m", "step_ms": 600.0, "h2d_bytes": 20e9, "d2h_bytes": 8e9}
    assert with_ratios(row, 300.0, Bandwidth(50.0, 40.0, 30.0)) == {
        **row, "floor_ms": 400.0, "floor_ratio": 1.5, "ratio": 2.0
    }  # fmt: skip
    nothing = {"floor_ms": None, "floor_ratio": None, "ratio": None}
    assert with_ratios(row, None, None) == {**row, **nothing}


@pytest.mark.slow
def test_a_run_compares_modes_and_names_what_failed(tmp_path: Path):
    shape = ["--hidden=64", "--intermediate=128", "--heads=4", "--blocks=2", "--seq-len=16", "--steps=2"]
    modes = ["none", "layer_stream", "layer_stream:slots=0"]
    command = [sys.executable, "scripts/bench.py", "--device", "cpu", *shape, "--json", tmp_path / "b.json", "--modes"]
    result = subprocess.run([*command, *modes], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300)
    assert "failed: UserError: offload.slots=0: must be at least 1" in result.stdout
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert rows[0]["loss"] == rows[1]["loss"]
    assert rows[1]["h2d_bytes"] > 0 == rows[0]["h2d_bytes"]


@pytest.mark.slow
def test_any_mode_is_built_by_its_name_with_its_knobs():
    for name in mode_options():
        assert build_mode(name)[0] == name
    _, mode = build_mode("layer_stream:slots=2,resident=60%")
    assert (type(mode), mode.slots, mode.resident) == (LayerStream, 2, "60%")
    _, mode = build_mode("tensor_swap:weights=bounce_linear,weights.slots=5,budget=auto")
    assert (type(mode.weights), mode.weights.slots, mode.budget) == (BounceLinear, 5, "auto")
    with pytest.raises(UserError, match=r"^offload\.weights\.slots=0: must be at least 1"):
        build_mode("layer_stream_swap:weights.slots=0")


def test_each_mode_but_the_resident_one_has_a_row_for_each_format():
    given = {"modes": ["layer_stream", "none"], "master": "compact", "state_dtype": "fp32"}
    found = list(rows_of(Namespace(**given, formats=["compact,bf16", "stochastic,int8"])))
    assert [name for name, _, _ in found] == ["none", "layer_stream compact,bf16", "layer_stream stochastic,int8"]
    assert [(own.master, own.state_dtype) for _, _, own in found] == [
        ("compact", "fp32"),
        ("compact", "bf16"),
        ("stochastic", "int8"),
    ]
    assert [(name, spec) for name, spec, _ in rows_of(Namespace(**given, formats=[]))] == [
        ("none", "none"),
        ("layer_stream", "layer_stream"),
    ]


@pytest.mark.slow
def test_formats_are_clipped_and_a_wrong_one_is_named():
    shape = ["--hidden=64", "--intermediate=128", "--heads=4", "--blocks=2", "--seq-len=16", "--steps=1"]
    keys = ["--modes", "layer_stream", "--optimizer", "--clip-norm=1e-3", "--threads=1"]
    command = [
        sys.executable, "scripts/bench.py", "--device", "cpu", *shape, *keys, "--formats", "stochastic,int8", "bf16",
    ]  # fmt: skip
    rows = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    ).stdout.splitlines()[2:]
    assert rows[0].startswith("layer_stream stochastic,int8")
    assert "failed" not in rows[0]
    assert rows[1].startswith("layer_stream bf16")
    assert "failed: KnobError: " in rows[1]
