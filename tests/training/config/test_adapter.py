"""A configuration tells without torch whether it trains an adapter."""

import subprocess
import sys

import pytest

from tests import ROOT
from tests.training.helpers.in_process import composed
from training.config.adapter import has_adapter


@pytest.mark.parametrize(("option", "expected"), [("none", False), ("lora", True), ("dora", True), ("rslora", True)])
def test_each_option(option: str, expected: bool):
    config, _ = composed(f"adapter={option}")
    assert has_adapter(config) == expected


def test_a_sweep_imports_no_torch():
    program = "import sys; from training.sweeps import launcher; print('torch' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True, timeout=300
    )
    assert ended.stdout == "False\n"
