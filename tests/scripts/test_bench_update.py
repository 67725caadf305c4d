"""The program that measures the optimizer's update on the host, with few parameters."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from offload.optimizer.kernels import native_library
from tests import ROOT

SCRIPT = ROOT / "scripts" / "bench_update.py"


@pytest.mark.slow
@pytest.mark.parametrize("state_dtype", ["fp32", "bf16"])
def test_prints_a_rate_for_each_kernel_and_number_of_threads(state_dtype: str):
    command = [sys.executable, str(SCRIPT), "--threads", "1", "2", "--parameters", "100000", "--repeats", "1"]
    run = subprocess.run([*command, "--state-dtype", state_dtype], capture_output=True, text=True, check=True)
    rows = re.findall(r"^ +(\d) threads +(\w+) +([\d.]+) Gparam/s +pause +[\d.]+ ms$", run.stdout, re.MULTILINE)
    kernels = ["fused", "native"] if native_library() else ["fused"]
    assert [(threads, kernel) for threads, kernel, _ in rows] == [(t, kernel) for t in "12" for kernel in kernels]
    assert run.stderr == ""
