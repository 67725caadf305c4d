"""Reads the results of a run: the parts that a bitwise equal run has too."""

import json
import re
from pathlib import Path

from training.runs.files import METRICS_FILE

MEASURED = re.compile(r"(perf|memory|transfer|optimizer|checkpoint)/|eval/ms$")


def content(checkpoint: Path) -> dict[str, str]:
    """Returns the hashes of a checkpoint's files except the configuration: equal hashes, equal state bit for bit."""
    files = json.loads((checkpoint / "manifest.json").read_text())["files"]
    return {name: record["sha256"] for name, record in files.items() if name != "config.yaml"}


def curve(run_dir: Path) -> list[dict]:
    """Returns the records of a run without measured values, and without a line that a kill left unfinished."""
    *lines, _unfinished = (run_dir / METRICS_FILE).read_text().split("\n")
    return [{key: value for key, value in json.loads(line).items() if not MEASURED.match(key)} for line in lines]


def losses(run_dir: Path) -> list[float]:
    """Returns the loss of each logged step of a run."""
    return [record["train/loss"] for record in curve(run_dir)]
