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
    for part in ("conf", "offload", "models", "training", "scripts", "tests/training/helpers"):
        shutil.copytree(ROOT / part, folder / part)
    for file in ("train.py", "tests/__init__.py", "tests/training/__init__.py"):
        shutil.copy(ROOT / file, folder / file)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for language, path in (("python", f"offload/modes/{NAME}.py"), ("yaml", f"conf/offload/{NAME}.yaml")):
        (block,) = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        assert path in text
        (folder / path).write_text(block)
    return folder


# Its arguments are a list of command lines of train.py in JSON; prints exit status and output of each.
PROGRAM = """
import json, sys
from scripts.bench import build_mode, weight_modes
from tests.training.helpers.in_process import command_here
from training.config.modes import mode_options

*commands, name = json.loads(sys.argv[1])
ended = [command_here(*command) for command in commands]
found = [name in mode_options(), name in weight_modes(), build_mode(f"{name}:group=3")[1].group]
print(json.dumps([*([end.returncode, end.stdout, end.stderr] for end in ended), found]))
"""


@pytest.fixture(scope="module")
def seen(repository: Path) -> dict:
    """What the copy prints for commands, in one process of its own, and where its code finds the mode."""
    commands = {
        mode: (f"offload={mode}", *RUN, f"hydra.run.dir={repository / 'runs' / mode}") for mode in ("none", NAME)
    }
    for value in ("9", "many"):
        commands[value] = (*RUN, f"offload={NAME}", f"offload.group={value}", f"hydra.run.dir={repository / value}")
    commands["page"] = (f"offload={NAME}", "--help")
    argument = json.dumps([*commands.values(), NAME])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], cwd=repository, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(zip((*commands, "found"), json.loads(result.stdout), strict=True))


def test_it_computes_the_numbers_of_the_resident_model(repository: Path, seen: dict):
    curves = {}
    for mode in ("none", NAME):
        status, output, errors = seen[mode]
        assert status == 0, output + errors
        folder = repository / "runs" / mode
        records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        curves[mode] = [{key: value for key, value in record.items() if key.startswith("train/")} for record in records]
        moved = json.loads((folder / "summary.json").read_text())["transfer/h2d_gib"]
        assert (moved > 0) == (mode == NAME)
    assert curves[NAME] == curves["none"]


@pytest.mark.parametrize(("value", "problem"), [("9", "the model has 4 blocks"), ("many", "'many'")])
def test_its_knobs_are_typed_and_checked(seen: dict, value: str, problem: str):
    status, output, line = seen[value]
    assert (status, output) == (1, "")
    assert line.startswith("error: offload.group")
    assert problem in line
    assert line.count("\n") == 1


def test_its_knobs_are_explained(seen: dict):
    status, page, _ = seen["page"]
    assert status == 0
    assert "offload.group     blocks that stream together. [2]" in page
    assert f"{NAME} " in page


def test_sweeps_and_the_benchmark_find_it(seen: dict):
    assert seen["found"] == [True, True, 3]
