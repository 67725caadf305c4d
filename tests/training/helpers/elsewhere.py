"""Programs in a process with folders of its own, to see what they write where."""

import os
import subprocess
import sys
from pathlib import Path

from tests import ROOT


def run_elsewhere(program: str, folder: Path, **environment: str) -> str:
    """Runs Python code in `folder`/here, with a home and a temporary folder beside it, and returns its output."""
    for name in ("home", "tmp", "here"):
        (folder / name).mkdir(parents=True)
    own = {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "PYTHONPATH": str(ROOT)}
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("HF_", "XDG_", "PYTHON"))}
    completed = subprocess.run(
        [sys.executable, "-c", program],
        env={**kept, **own, **environment},
        cwd=folder / "here",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout
