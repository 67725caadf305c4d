"""The benchmark of several devices runs on the CPU, and its figures fit together."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

SMALL = "--hidden 64 --intermediate 96 --blocks 3 --heads 4 --sequences 1 --seq-len 16 --steps 1 --warmup 1"


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "scripts/bench_ranks.py", "--device", "cpu", *SMALL.split(), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_ranks_copy_their_parts(tmp_path: Path):
    of_torch = ("--ddp", "--fsdp2", "--fsdp2-offload")
    done = bench("--optimizer", *of_torch, "--json", str(tmp_path / "rows.json"))
    assert done.returncode == 0, done.stderr
    none, alone, shared, replicated, sharded, offloaded = json.loads((tmp_path / "rows.json").read_text())["rows"]
    assert "failed" not in none | alone | shared | replicated | sharded | offloaded, done.stdout
    assert offloaded["loss"] == sharded["loss"]
    for row in (replicated, sharded, offloaded):
        assert row["to_none"] == pytest.approx(row["step_ms"] / none["step_ms"])
    assert none["in_gb"] == 0
    assert shared["in_gb"] == pytest.approx(alone["in_gb"] / 2, rel=0.1)
    assert shared["out_gb"] == pytest.approx(alone["out_gb"] / 2, rel=0.1)
    assert "3 blocks of 64, 16 tokens a device" in done.stdout


@pytest.mark.slow
def test_what_it_does_not_measure_is_refused():
    done = bench("--head", "100")
    assert done.returncode == 2
    assert "blocks alone, with one microbatch" in done.stderr
