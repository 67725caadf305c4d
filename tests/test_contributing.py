"""The mode that CONTRIBUTING shows works as it stands there: two files, and everything finds it."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

NAME = "group_stream"
RUN = (
    "model.hidden_size=16",
    "model.intermediate_size=32",
    "seq_len=16",
    "batch_size=2",
    "steps=3",
    "log_every=1",
    "dataset=synthetic",
    "device=cpu",
    "hardware=h200",
    "tracking=disabled",
)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the two files."""
    folder = tmp_path_factory.mktemp("repository")
    for part in ("conf", "offload", "models", "training", "scripts"):
        shutil.copytree(ROOT / part, folder / part)
    shutil.copy(ROOT / "train.py", folder)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for language, path in (("python", f"offload/modes/{NAME}.py"), ("yaml", f"conf/offload/{NAME}.yaml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert path in text
        (folder / path).write_text(block)
    return folder


def command(repository: Path, *arguments: str, status: int = 0) -> str:
    result = subprocess.run([sys.executable, *arguments], cwd=repository, capture_output=True, text=True, timeout=300)
    assert result.returncode == status, result.stdout + result.stderr
    return result.stdout + result.stderr


def test_it_computes_the_numbers_of_the_resident_model(repository: Path):
    seen = {}
    for mode in ("none", NAME):
        folder = repository / "runs" / mode
        command(repository, "train.py", f"offload={mode}", *RUN, f"hydra.run.dir={folder}")
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        seen[mode] = [{key: value for key, value in record.items() if key.startswith("train/")} for record in records]
        moved = json.loads((folder / "summary.json").read_text())["transfer/h2d_gib"]
        assert (moved > 0) == (mode == NAME)
    assert seen[NAME] == seen["none"]


def test_its_knobs_are_typed_checked_and_explained(repository: Path):
    for value, problem in (("9", "the model has 4 blocks"), ("many", "'many'")):
        line = command(repository, "train.py", *RUN, f"offload={NAME}", f"offload.group={value}", status=1)
        assert line.startswith("error: offload.group")
        assert problem in line
        assert line.count("\n") == 1
    page = command(repository, "train.py", f"offload={NAME}", "--help")
    assert "offload.group     blocks that stream together. [2]" in page
    assert f"{NAME} " in page


def test_sweeps_and_the_benchmark_find_it(repository: Path):
    finds = (
        "from training.config.modes import mode_options; from scripts.bench import build_mode, weight_modes;"
        f"print('{NAME}' in mode_options(), '{NAME}' in weight_modes(), build_mode('{NAME}:group=3')[1].group)"
    )
    assert command(repository, "-c", finds).split() == ["True", "True", "3"]
