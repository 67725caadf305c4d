"""A few cases of each part of the survey."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="the survey needs Linux")
def test_each_case_ends_as_it_must():
    """In a process of its own, because the survey forks."""
    command = [sys.executable, "-m", "tests.faults", "--kills=1", "--exits=2"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "kills: 1 of 1 cases" in ended.stdout
    assert "exits: 2 of 2 cases" in ended.stdout
