"""Runs of peers in the process of a test, beside the resident model."""

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.in_process import TINY_RUN, components_of, run_here
from training.errors import UserError

EVERY_STEP = (*TINY_RUN, "log_every=1", "steps=4", "warmup_steps=4")
ON_GPU = ("device=cuda", "precision=bf16", "clip_norm=null", "optimizer.lr=0.01")


def skip_without(package: str) -> None:
    """Skips a test of a system that is not installed. Some cannot be imported where there is no GPU."""
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed: pip install -r requirements-peers.txt")


def curve(folder: Path, *overrides: str) -> list[tuple[float, float | None]]:
    """Returns loss and gradient norm of each step of a run."""
    run_here(folder, *EVERY_STEP, *overrides)
    return _logged(folder)


def curve_of_process(folder: Path, *overrides: str) -> list[tuple[float, float | None]]:
    """Returns the same of a run in a process of its own, for a system that runs once in a process."""
    arguments = [*EVERY_STEP, *overrides, f"hydra.run.dir={folder}"]
    subprocess.run([sys.executable, "train.py", *arguments], cwd=ROOT, check=True, timeout=300)
    return _logged(folder)


def _logged(folder: Path) -> list[tuple[float, float | None]]:
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(record["train/loss"], record.get("train/grad_norm")) for record in records if "train/loss" in record]


def notes(folder: Path) -> list[str]:
    """Returns the notes in the summary of a run."""
    return json.loads((folder / "summary.json").read_text())["notes"]


def refusal(*overrides: str) -> str:
    """Returns why a run is refused before its plan."""
    with pytest.raises(UserError) as caught:
        components_of(*EVERY_STEP, *overrides)
    return str(caught.value)
