"""A few cases of each part of the survey."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytestmark = pytest.mark.slow

COUNTS = {"kills": 1, "exits": 2}


@pytest.fixture(scope="module")
def survey(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """The figures of a short survey, which needs a process of its own, because it forks."""
    if not Path("/proc/self/task").is_dir():
        pytest.skip("the survey needs Linux")
    figures = tmp_path_factory.mktemp("survey") / "figures.json"
    counts = [f"--{part}={count}" for part, count in COUNTS.items()]
    subprocess.run(
        [sys.executable, "-m", "tests.faults", *counts, f"--json={figures}"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        timeout=600,
    )
    return json.loads(figures.read_text())["parts"]


@pytest.mark.parametrize("part", COUNTS)
def test_each_case_ends_as_it_must(survey: dict, part: str):
    outcome = survey[part]
    assert outcome["wrong"] == []
    assert outcome["cases"] == outcome["planned"] == COUNTS[part]
