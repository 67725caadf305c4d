"""train.py from the command line, without training: speed of answering, the help page, mistakes."""

import json
import os
import subprocess
import sys
from dataclasses import fields

import pytest

from tests import ROOT
from training.config.schema import Checkpointing, Parallel, TrainConfig


def train(*arguments, python=(), **environment):
    return subprocess.run(
        [sys.executable, *python, "train.py", *arguments],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=300,
    )


@pytest.mark.slow
def test_showing_the_configuration_imports_nothing_heavy():
    process = train("--cfg", "job", python=("-X", "importtime"))
    assert process.returncode == 0
    imported = {line.rpartition("|")[2].strip().partition(".")[0] for line in process.stderr.splitlines()}
    assert "hydra" in imported
    # torch is, because the modes declare their keys.
    assert not imported & {"wandb", "datasets", "rich", "matplotlib", "tokenizers", "safetensors"}


def test_help_names_every_group_option_and_key():
    process = train("--help")
    assert process.returncode == 0
    words = process.stdout.replace(",", " ").split()
    options = [path for path in (ROOT / "conf").glob("*/*.yaml") if path.parent.name != "hydra"]
    wanted = {path.stem for path in options} | {path.parent.name for path in options}
    # A section is named by its keys.
    wanted |= {entry.name for entry in fields(TrainConfig)} - {"checkpoint", "eval", "parallel", "sample"}
    wanted |= {f"checkpoint.{entry.name}" for entry in fields(Checkpointing)}
    wanted |= {f"parallel.{entry.name}" for entry in fields(Parallel)}
    assert sorted(wanted - set(words)) == []
    assert "schema" not in process.stdout.partition("The options of each group are files")[0]
    assert max(len(line) for line in process.stdout.splitlines()) <= 120


@pytest.mark.parametrize("command", ["--cfg job", "-m", ""])
@pytest.mark.slow
def test_a_typo_is_one_line(tmp_path, command):
    process = train(*command.split(), "ofload=none", f"hydra.run.dir={tmp_path}", f"hydra.sweep.dir={tmp_path}")
    assert process.returncode == 1
    assert process.stderr.startswith("error: ofload: unknown key. Did you mean offload?")
    assert process.stderr.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_value_out_of_range_is_one_line_and_a_summary(tmp_path):
    process = train("steps=0", f"hydra.run.dir={tmp_path}")
    assert process.returncode == 1
    assert process.stderr == "error: steps=0: must be at least 1, or null\n"
    assert json.loads((tmp_path / "summary.json").read_text())["status"] == "failed"
    assert "UserError" in (tmp_path / "train.log").read_text()


@pytest.mark.slow
def test_config_dir_adds_options_of_the_user(tmp_path):
    (tmp_path / "experiment").mkdir()
    (tmp_path / "experiment" / "mine.yaml").write_text("# @package _global_\nsteps: 7\n")
    process = train("--config-dir", str(tmp_path), "experiment=mine", "--cfg", "job")
    assert "\nsteps: 7\n" in process.stdout
