"""A model and a dataset outside of the repository train without a change in it."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.training.helpers.in_process import TINY_RUN, command_here
from training.config.own_options import register_own
from training.config.schema import SCHEMAS
from training.errors import UserError

KNOWN = dict(SCHEMAS)
MODULE = """
import torch
from torch import nn


class Noise:
    num_blocks = None

    def __init__(self, size: int = 8, *, seed: int, batch_size: int):
        self.size, self.seed, self.batch_size = size, seed, batch_size

    @staticmethod
    def meta_batch(rows, *, size=8, **others):
        return {"images": torch.empty(rows, 3, size, size, device="meta")}

    def batch(self, index):
        generator = torch.Generator().manual_seed(self.seed + index)
        return {"images": torch.randn(self.batch_size, 3, self.size, self.size, generator=generator)}


class Net(nn.Module):
    def __init__(self, depth: int = 2):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(depth))

    def forward(self, noisy, timestep):
        for block in self.blocks:
            noisy = noisy + block(noisy)
        return noisy


class Untyped:
    def __init__(self, size):
        pass
"""
OPTION = "# {target}\ndefaults:\n  - /schema/{group}/{name}@_here_\n  - _self_\n_target_: {target}\n"


def write(folder: Path, group: str, name: str, target: str, more: str = "") -> Path:
    file = folder / "conf" / group / f"{name}.yaml"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(OPTION.format(group=group, name=name, target=target) + more)
    (folder / "mine.py").write_text(MODULE)
    return file


def forget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves the repository's own options."""
    for group, options in KNOWN.items():
        monkeypatch.setitem(SCHEMAS, group, dict(options))


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    forget(monkeypatch)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("registered")
def test_it_trains_alike_under_each_mode(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write(tmp_path, "dataset", "noise", "mine.Noise", "size: 16\n")
    write(tmp_path, "model", "net", "mine.Net", "depth: 3\n")
    run = [each for each in TINY_RUN if not each.startswith(("model.", "dataset=", "seq_len"))]
    run += ["dataset=noise", "model=net", "task=flow_matching", "steps=2"]
    losses = []
    for mode in ("none", "layer_stream"):
        forget(monkeypatch)
        keys = (f"offload={mode}", f"hydra.run.dir={tmp_path / mode}")
        done = command_here("--config-dir", str(tmp_path / "conf"), *run, *keys)
        assert done.returncode == 0, done.stdout + done.stderr
        losses.append(json.loads((tmp_path / mode / "summary.json").read_text())["train/final_loss"])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_the_process_of_another_device_has_it_too(tmp_path: Path):
    write(tmp_path, "dataset", "noise", "mine.Noise", "size: 16\n")
    write(tmp_path, "model", "net", "mine.Net", "depth: 3\n")
    run = [each for each in TINY_RUN if not each.startswith(("model.", "dataset=", "seq_len"))]
    run += ["dataset=noise", "model=net", "task=flow_matching", "steps=1", "devices=2", f"hydra.run.dir={tmp_path}"]
    command = [sys.executable, "train.py", "--config-dir", str(tmp_path / "conf"), *run]
    found = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, cwd=ROOT, env=found, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.usefixtures("registered")
@pytest.mark.parametrize(
    ("name", "target", "problem"),
    [
        ("glyphs", "mine.Noise", r"dataset=glyphs is an option already: take another name$"),
        (
            "noise",
            "nowhere.Noise",
            r"_target_=nowhere\.Noise cannot be imported \(No module named 'nowhere'\): put the",
        ),
        ("noise", "mine.Other", r"_target_=mine\.Other cannot be imported \(.*\): put the folder"),
        ("noise", "mine.Untyped", r"the argument 'size' of mine\.Untyped has no type: give it one$"),
    ],
)
def test_what_cannot_be_used_is_refused_in_one_line(name: str, target: str, problem: str, tmp_path: Path):
    file = write(tmp_path, "dataset", name, target)
    with pytest.raises(UserError, match=problem) as refused:
        register_own(["--config-dir", str(tmp_path / "conf")])
    assert str(refused.value).startswith(f"{file}: ")
    assert "\n" not in str(refused.value)


@pytest.mark.usefixtures("registered")
def test_a_file_without_a_class_is_refused(tmp_path: Path):
    file = write(tmp_path, "dataset", "noise", "mine.Noise")
    file.write_text("size: 3\n")
    with pytest.raises(UserError, match=r"has no _target_: give it the class, _target_: MODULE\.CLASS$"):
        register_own([f"--config-dir={tmp_path / 'conf'}"])


@pytest.mark.usefixtures("registered")
def test_a_file_without_the_keys_of_its_class_is_told_the_line_to_begin_with(tmp_path: Path):
    file = write(tmp_path, "dataset", "noise", "mine.Noise")
    file.write_text("_target_: mine.Noise\n")
    with pytest.raises(UserError, match=r"begin it with the line (.*)$") as refused:
        register_own([f"--config-dir={tmp_path / 'conf'}"])
    line = str(refused.value).partition("the line ")[2]
    file.write_text(f"{line}\n_target_: mine.Noise\n")
    register_own([f"--config-dir={tmp_path / 'conf'}"])
    assert "noise" in SCHEMAS["dataset"]


@pytest.mark.usefixtures("registered")
def test_a_command_line_without_a_folder_registers_nothing():
    before = {group: set(options) for group, options in SCHEMAS.items()}
    register_own(["offload=none", "-m"])
    assert {group: set(options) for group, options in SCHEMAS.items()} == before
