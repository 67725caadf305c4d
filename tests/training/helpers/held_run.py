"""Runs train.py in a process of its own that a test can hold up: what a busy machine would decide, the test does."""

import os
import subprocess
import sys
from typing import Any

from tests import ROOT

# Waits in a step until a file is there; signals that come within an hour of the first are one request.
_PROGRAM = """
import os, runpy, sys, time
from training.run import loop
from training.runs import signals

step, go = int(os.environ.pop("HELD_STEP")), os.environ.pop("HELD_UNTIL")
compute = loop.forward_backward

def held(*arguments):
    while arguments[-1] == step and not os.path.exists(go):
        time.sleep(0.01)
    return compute(*arguments)

loop.forward_backward = held
signals.SAME_REQUEST_S = 3600.0
sys.argv[0] = "train.py"
runpy.run_path("train.py", run_name="__main__")
"""


def start_held(*overrides: str, step: int = 0, until: object = "", **options: Any) -> subprocess.Popen:
    """Starts `python train.py OVERRIDES`, which waits in `step` until the path `until` exists; 0 is no step."""
    environment = os.environ | {"HELD_STEP": str(step), "HELD_UNTIL": str(until)}
    return subprocess.Popen([sys.executable, "-c", _PROGRAM, *overrides], cwd=ROOT, env=environment, **options)
