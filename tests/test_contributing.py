"""The mode and the task that CONTRIBUTING shows work as they stand there, and everything finds them."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT

NAME = "group_stream"
FILES = {
    "python": (f"offload/modes/{NAME}.py", "training/tasks/denoising.py"),
    "yaml": (f"conf/offload/{NAME}.yaml", "conf/task/denoising.yaml"),
}
RUN = (
    "model.hidden_size=16", "model.intermediate_size=32", "seq_len=16", "batch_size=2", "steps=3", "log_every=1",
    "dataset=synthetic", "device=cpu", "hardware=h200", "tracking=disabled",
)  # fmt: skip


TASK = (
    "task=denoising", "model=diffusers", "model.source=unet_small",
    "model.overrides={block_out_channels: [8, 16], norm_num_groups: 4}", "dataset=glyphs",
    "dataset.characters=ABCDEFGH", "dataset.size=16", "dataset.count=50", "batch_size=4", "microbatches=2", "steps=2",
    "log_every=1", "device=cpu", "hardware=h200", "tracking=disabled",
)  # fmt: skip


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository with the two files."""
    folder = tmp_path_factory.mktemp("repository")
    for part in ("conf", "offload", "models", "peers", "training", "scripts", "tests/training/helpers"):
        shutil.copytree(ROOT / part, folder / part)
    for file in ("train.py", "tests/__init__.py", "tests/training/__init__.py"):
        shutil.copy(ROOT / file, folder / file)
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for language, paths in FILES.items():
        blocks = re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
        for path, block in zip(paths, blocks, strict=True):
            assert path in text
            (folder / path).write_text(block)
    schema = folder / "training/config/schema.py"
    entry = '"denoising": "training.tasks.denoising.Denoising"'
    assert entry in text
    schema.write_text(schema.read_text().replace("TASKS = {", f"TASKS = {{{entry}, "))
    return folder


# Its arguments are a list of command lines of train.py in JSON; prints exit status and output of each.
PROGRAM = """
import json, sys
from scripts.bench import weight_modes
from scripts.workload import build_mode
from tests.training.helpers.in_process import command_here
from training.config.modes import mode_options

*commands, name = json.loads(sys.argv[1])
ended = [command_here(*command) for command in commands]
found = [name in mode_options(), name in weight_modes(), build_mode(f"{name}:group=3")[1].group]
print(json.dumps([*([end.returncode, end.stdout, end.stderr] for end in ended), found]))
"""


@pytest.fixture(scope="module")
def seen(repository: Path) -> dict:
    """Returns what the copy prints for commands that are refused and for help, and where its code finds the mode."""
    commands = {
        value: (*RUN, f"offload={NAME}", f"offload.group={value}", f"hydra.run.dir={repository / value}")
        for value in ("9", "many")
    }
    commands["time"] = (*TASK, "task.largest_time=2", f"hydra.run.dir={repository / 'time'}")
    return of_copy(repository, commands | {"page": (f"offload={NAME}", "--help")})


def of_copy(repository: Path, commands: dict[str, tuple[str, ...]]) -> dict:
    """Returns what the copy prints for the commands, all in one process, and under `found` where it finds the mode."""
    argument = json.dumps([*commands.values(), NAME])
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, argument], cwd=repository, capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return dict(zip((*commands, "found"), json.loads(result.stdout), strict=True))


def trained(repository: Path, name: str, keys: tuple[str, ...]) -> dict[str, list[dict]]:
    """Trains with the keys in the copy, resident and under the mode; returns the logged steps of each."""
    folders = {mode: repository / name / mode for mode in ("none", NAME)}
    ended = of_copy(
        repository, {mode: (f"offload={mode}", *keys, f"hydra.run.dir={folder}") for mode, folder in folders.items()}
    )
    for mode in folders:
        status, output, errors = ended[mode]
        assert status == 0, output + errors
    lines = {mode: (folder / "metrics.jsonl").read_text().splitlines() for mode, folder in folders.items()}
    return {mode: list(map(json.loads, of_run)) for mode, of_run in lines.items()}


@pytest.mark.slow
def test_it_computes_the_numbers_of_the_resident_model(repository: Path):
    curves = {}
    for mode, records in trained(repository, "runs", RUN).items():
        curves[mode] = [{key: value for key, value in record.items() if key.startswith("train/")} for record in records]
        moved = json.loads((repository / "runs" / mode / "summary.json").read_text())["transfer/h2d_gib"]
        assert (moved > 0) == (mode == NAME)
    assert curves[NAME] == curves["none"]


@pytest.mark.slow
def test_its_task_computes_the_numbers_of_the_resident_model(repository: Path):
    curves = {}
    for mode, records in trained(repository, "tasks", TASK).items():
        assert records[-1]["train/images"] == 8
        curves[mode] = [record["train/loss"] for record in records]
    assert curves[NAME] == curves["none"]


def test_a_value_out_of_range_of_its_task_is_refused(seen: dict):
    status, _, line = seen["time"]
    assert (status, line.count("\n")) == (1, 1)
    assert line.startswith("error: task.largest_time=2")


@pytest.mark.parametrize(
    ("value", "problem"), [("9", "the model has 4 blocks"), ("many", "=many: must be a whole number")]
)
def test_its_knobs_are_typed_and_checked(seen: dict, value: str, problem: str):
    status, output, line = seen[value]
    assert (status, output) == (1, "")
    assert line.startswith("error: offload.group")
    assert problem in line
    assert line.count("\n") == 1


def test_its_knobs_are_explained(seen: dict):
    status, page, _ = seen["page"]
    assert status == 0
    assert re.search(r"offload\.group +blocks that stream together\. \[2\]", page)
    assert f"{NAME} " in page


def test_sweeps_and_the_benchmark_find_it(seen: dict):
    assert seen["found"] == [True, True, 3]
