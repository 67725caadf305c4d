"""The notebooks of examples/ run, and print what they show; its configurations run by the commands in them."""

import contextlib
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import ROOT
from tests.models.helpers.tiny_pipelines import saved
from tests.training.helpers.captioned import draw_pictures
from tests.training.helpers.documented import SMALL_QWEN, commands
from tests.training.helpers.in_process import command_here
from tests.training.helpers.results import losses
from training.config import schema

EXAMPLES = ROOT / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))
FILES = sorted(EXAMPLES.glob("**/*.yaml"))
SHORT = ("device=cpu", "hardware=h200", "tracking=disabled", "steps=4", "log_every=1", "warmup_steps=1", "batch_size=2")
OFTEN = ("epochs=null", "eval.every=2", "eval.batches=2", "checkpoint.every=2", "seq_len=256")
SMALL = {
    "lora_chat": (*SMALL_QWEN, *OFTEN),
    "full_fine_tune": (*SMALL_QWEN, *OFTEN, "sample.every=4", "sample.tokens=4"),
    "lora_pictures": (
        "model.source=pipeline",
        "dataset.size=64",
        "dataset.multiple=32",
        "sample.every=4",
        "checkpoint.every=2",
    ),
    "own_model": ("model.width=16", "model.depth=2", "seq_len=32"),
}
FAST = ("lora_chat", "own_model")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path):
    names: dict[str, object] = {}
    for cell in json.loads(path.read_text())["cells"]:
        if cell["cell_type"] != "code":
            continue
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec("".join(cell["source"]), names)
        shown = "".join("".join(output["text"]) for output in cell["outputs"])
        if not torch.cuda.is_available():
            # The outputs were made on a CPU.
            assert printed.getvalue() == shown
    assert names["losses"] == names["expected"]


def test_every_file_is_run_and_in_the_list():
    assert {path.stem for path in FILES} == SMALL.keys() | {"mode_sweep"}
    listed = (EXAMPLES / "README.md").read_text()
    for path in FILES:
        assert f"]({path.relative_to(EXAMPLES)})" in listed
        (command,) = re.findall(r"^#   (.*python train\.py .*)$", path.read_text(), re.MULTILINE)
        assert f"`{command}`" in listed


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in SMALL])
def test_an_example_trains(
    name: str, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(EXAMPLES / "own")
    monkeypatch.setitem(schema.SCHEMAS, "model", dict(schema.SCHEMAS["model"]))
    small = SMALL[name]
    if name == "lora_pictures":
        pipeline, pictures = saved("stable_diffusion", tmp_path_factory), draw_pictures(tmp_path / "pictures")
        small = (*small, f"model.source={pipeline}", f"dataset.folder={pictures}")
    (path,) = (path for path in FILES if path.stem == name)
    (arguments,) = commands(path)
    ended = command_here(*arguments, *SHORT, *small, f"hydra.run.dir={tmp_path / 'run'}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["steps"] == 4


@pytest.mark.slow
def test_the_sweep_compares_its_modes(tmp_path: Path):
    (arguments,) = commands(EXAMPLES / "experiment" / "mode_sweep.yaml")
    small = (
        "dataset=synthetic", "model.hidden_size=16", "model.intermediate_size=32", "seq_len=32", "recompute=none",
        "seed=0",
    )  # fmt: skip
    command = [sys.executable, "train.py", *arguments, *SHORT, *small, f"hydra.sweep.dir={tmp_path}"]
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert len({tuple(losses(tmp_path / str(number))) for number in range(3)}) == 1
    assert (tmp_path / "compare.html").exists()
