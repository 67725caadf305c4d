"""The program that writes a wandb workspace, run as a user runs it, without a login."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

pytest.importorskip("wandb_workspaces", reason="wandb-workspaces is not installed (pip install wandb-workspaces)")

SCRIPT = ROOT / "scripts" / "dashboard.py"


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("WANDB_")}
    own = {"HOME": str(folder), "NETRC": str(folder / ".netrc")}
    command = [sys.executable, str(SCRIPT), *arguments]
    return subprocess.run(command, cwd=folder, env=environment | own, capture_output=True, text=True, timeout=300)


def test_the_specification_is_written_for_the_given_project(tmp_path: Path):
    result = run(tmp_path, "--project=mine", "--entity=me", "--out=workspace.json")
    assert result.returncode == 0, result.stderr
    specification = json.loads((tmp_path / "workspace.json").read_text())
    assert (specification["entity"], specification["project"]) == ("me", "mine")
    first, second = result.stdout.splitlines()
    assert first == "specification: workspace.json"
    assert second.endswith("--project=mine --entity=me --out=workspace.json --publish")


def test_a_folder_that_is_missing_is_one_line(tmp_path: Path):
    result = run(tmp_path, "--out=missing/workspace.json")
    assert (result.returncode, result.stdout) == (1, "")
    assert result.stderr.startswith("error: --out missing/workspace.json: ")
    assert result.stderr.count("\n") == 1
