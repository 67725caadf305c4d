"""The program that measures the optimizer's update on the host, with few parameters."""

import re
import subprocess
import sys

import pytest
import torch

from offload.optimizer.formats import StateFormat
from offload.optimizer.native_kernel import native_library
from tests import ROOT

SCRIPT = ROOT / "scripts" / "bench_update.py"


@pytest.mark.slow
def test_prints_a_rate_for_each_format_kernel_and_number_of_threads():
    command = [sys.executable, str(SCRIPT), "--threads", "1", "2", "--parameters", "100000", "--repeats", "1"]
    command += ["--master", "compact", "stochastic", "--state-dtype", "fp32", "bf16"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    formats = re.findall(r"^master (\w+), moments (\w+), ([\d.]+) bytes a parameter$", run.stdout, re.MULTILINE)
    assert formats == [
        ("compact", "fp32", "26.0"),
        ("compact", "bf16", "18.0"),
        ("stochastic", "fp32", "22.0"),
        ("stochastic", "bf16", "14.0"),
    ]
    row = r"^ +(\d) threads +(\w+) +(?:([\d.]+) Gparam/s +)?([\d.]+) GB/s(?: +pause +[\d.]+ ms)?$"
    rows = re.findall(row, run.stdout, re.MULTILINE)
    kernels = ["fused", "native"] if native_library(StateFormat()) else ["fused"]
    assert [(threads, kernel) for threads, kernel, *_ in rows] == [
        (threads, kernel) for threads in "12" for kernel in (*kernels, "copy")
    ] * 4
    assert run.stderr == ""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_prints_a_rate_for_each_kernel_of_a_gpu():
    command = [sys.executable, str(SCRIPT), "--threads", "1", "--parameters", "100000", "--repeats", "1"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    assert "GPU  fused" in run.stdout
