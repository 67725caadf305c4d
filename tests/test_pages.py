"""The pages that lead through a task: their commands and programs run, made small."""

import importlib
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from offload.streams import registry
from tests import ROOT
from tests.training.helpers.documented import commands
from tests.training.helpers.in_process import command_here
from tests.training.helpers.results import losses

DOCS = ROOT / "docs"
PROGRAM = re.compile(r"^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


def test_the_loop_of_your_own_has_the_losses_of_a_resident_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    program = "".join(PROGRAM.findall((DOCS / "own_loop.md").read_text()))
    exec(program, streamed := {})
    assert streamed["moved"].h2d_bytes > 0
    as_resident = program.replace("LayerStream(slots=2)", "Resident()").replace(
        "import HostAdamW", "import Resident, HostAdamW"
    )
    exec(as_resident, resident := {})
    assert resident["moved"].h2d_bytes == 0
    for name in ("losses", "held_out"):
        assert streamed[name] == resident[name]
    assert registry.holders("cpu") == 0


@pytest.mark.parametrize("page", ["8b_on_a_4090", "paper_sweep"])
def test_the_commands_compose(page: str):
    for arguments in commands(DOCS / f"{page}.md"):
        alone = [argument for argument in arguments if argument != "-m"]
        ended = command_here(*alone, "--cfg", "job")
        assert ended.returncode == 0, ended.stderr
        assert "seed: 0" in ended.stdout


@pytest.mark.slow
def test_the_plans_of_the_8b_model_fit(tmp_path: Path):
    plans = [arguments for arguments in commands(DOCS / "8b_on_a_4090.md") if "plan=true" in arguments]
    assert len(plans) == 3
    for number, arguments in enumerate(plans):
        ended = command_here(*arguments, "tracking=disabled", f"hydra.run.dir={tmp_path / str(number)}")
        assert ended.returncode == 0, ended.stdout + ended.stderr
        assert json.loads((tmp_path / str(number) / "summary.json").read_text())["reason"] is None


@pytest.mark.slow
def test_the_pages_of_the_api_have_every_public_name(tmp_path: Path):
    pytest.importorskip("pdoc")
    line = re.search(r"^scripts/run\.sh (pdoc .*)$", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)[1]
    command = shlex.split(line, comments=True)
    command[command.index("api")] = str(tmp_path)
    result = subprocess.run([sys.executable, "-m", *command], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert result.returncode == 0, result.stderr
    for module in command[command.index(str(tmp_path)) + 1 :]:
        page = (tmp_path / f"{module.replace('.', '/')}.html").read_text()
        for name in importlib.import_module(module).__all__:
            assert f'id="{name}"' in page


@pytest.mark.slow
def test_the_sweep_is_planned_and_run_and_compared(tmp_path: Path):
    small = (
        "dataset=synthetic", "model=tiny", "model.hidden_size=16", "model.intermediate_size=32", "seq_len=32",
        "steps=3", "device=cpu", "hardware=h200", "tracking=disabled", "seed=0", "recompute=none",
        "offload=none,layer_stream",
    )  # fmt: skip
    plan, run, again = commands(DOCS / "paper_sweep.md")
    (compare,) = commands(DOCS / "paper_sweep.md", "scripts/compare.py")
    in_folder = [argument.replace("runs/paper", str(tmp_path / "runs")) for argument in compare]
    in_folder[in_folder.index("paper")] = str(tmp_path / "paper")
    for program, *arguments in (
        ("train.py", *plan, *small, f"hydra.sweep.dir={tmp_path / 'plan'}"),
        ("train.py", *run, *small, f"hydra.sweep.dir={tmp_path / 'runs'}"),
        ("train.py", *again, *small, f"hydra.sweep.dir={tmp_path / 'runs'}"),
        ("scripts/compare.py", *in_folder),
    ):
        result = subprocess.run(
            [sys.executable, program, *arguments], cwd=ROOT, capture_output=True, text=True, timeout=300
        )
        assert result.returncode == 0, result.stdout + result.stderr
    assert losses(tmp_path / "runs" / "0") == losses(tmp_path / "runs" / "1")
    made = {path.suffix for path in (tmp_path / "paper").iterdir()}
    assert {".pdf", ".tex", ".csv", ".html"} <= made
