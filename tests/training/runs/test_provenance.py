"""The program that a run ran, and when."""

from __future__ import annotations

import subprocess
from datetime import datetime, timedelta
from pathlib import Path

import torch

from training.runs.provenance import commit, provenance


def test_the_versions_and_the_date():
    facts = provenance()
    assert facts["torch"] == torch.__version__
    age = datetime.now().astimezone() - datetime.fromisoformat(facts["date"])
    assert timedelta(0) <= age < timedelta(minutes=5)


def test_the_commit_is_that_of_the_source_alone(tmp_path: Path):
    assert commit(tmp_path) is None
    source = tmp_path / "checkout"
    git = ["git", "-C", str(source), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    (source / "file").write_text("1")
    subprocess.run([*git, "add", "file"], check=True)
    subprocess.run([*git, "commit", "-qm", "first"], check=True)
    head = subprocess.run([*git, "rev-parse", "HEAD"], check=True, capture_output=True, text=True).stdout
    (source / "file").write_text("2")
    known = commit(source)
    assert known == f"{head[:10]}-dirty"
    (source / "below").mkdir()
    assert commit(source / "below") is None
