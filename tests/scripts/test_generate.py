"""scripts/generate.py: text of a checkpoint, in every mode the same, and its mistakes in one line."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from scripts import generate
from tests.training.helpers.in_process import TINY_RUN, composed, conf_initialised, hydra_as_before, run_here
from training.config.modes import mode_options
from training.runs import compose_errors, repeat
from training.runs.directory import RunDirectory
from training.saved_runs import finding


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with checkpoints after steps 2 and 4, and with the files that train.py writes around it."""
    folder = tmp_path_factory.mktemp("run")
    overrides = (
        *TINY_RUN,
        "dataset=stdlib",
        "dataset.max_tokens=20000",
        "steps=4",
        "checkpoint.every=2",
        "offload=layer_stream",
    )
    run_here(folder, *overrides)
    RunDirectory(folder).write_config(*composed(*overrides, run_dir=folder))
    return folder


def called(monkeypatch: pytest.MonkeyPatch, *arguments: str | Path) -> int | None:
    """Runs the program in this process; returns its exit status."""
    monkeypatch.setattr(sys, "argv", ["generate.py", *map(str, arguments)])
    with hydra_as_before():
        try:
            compose_errors.run(generate.main)
        except SystemExit as end:
            return end.code
    return 0


@pytest.mark.slow
def test_the_text_is_the_same_in_every_mode(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    asked = (run, "def main(", "--tokens", "8", "--temperature", "3", "--seed", "5")
    assert called(monkeypatch, *asked) == 0
    text = capsys.readouterr().out
    for module in (finding, repeat):
        # From here on conf/ is read once, not twice for each mode.
        monkeypatch.setattr(module, "initialize_config_dir", lambda *folder, **version: conf_initialised())
    assert text.startswith("def main(")
    assert all(line.isprintable() for line in text.split("\n"))
    for offload in mode_options():
        shards = ["offload.shards=2"] if offload == "shard_offload" else []
        assert called(monkeypatch, *asked, f"offload={offload}", *shards) == 0
        assert capsys.readouterr().out == text, offload
    for other in ((run / "checkpoints" / "step-00000002", *asked[1:]), (*asked[:-1], "6")):
        assert called(monkeypatch, *other) == 0
        assert capsys.readouterr().out != text


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (("--top-p", "1.5"), "--top-p=1.5: must be"),
        (("--top-p", "nan"), "--top-p=nan: must be"),
        (("--temperature", "-1"), "--temperature=-1.0: must be at least 0"),
        (("--tokens", "0"), "--tokens=0: must be at least 1"),
        (("--tokens", "1000000000000"), "a text of 1,000,000,000,001 tokens does not fit, its keys, values and"),
        (("offload=nothing",), "offload=nothing: there is no such option"),
        (("model.hidden_size=32",), "model.safetensors: tensor "),
        (("dataset=synthetic",), "SyntheticTokens has no key dataset.tokenizer"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_one_line(
    run: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: tuple[str, ...],
    problem: str,
):
    assert called(monkeypatch, run, "a", *arguments) == 1
    shown = capsys.readouterr()
    assert shown.err.splitlines()[-1].startswith("error: ")
    assert problem in shown.err.splitlines()[-1]
    assert "Traceback" not in shown.err
    assert shown.out == ""


@pytest.mark.slow
def test_a_run_without_a_checkpoint_an_unknown_path_and_a_damaged_one_are_refused(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for name in ("config.yaml", "choices.yaml"):
        (tmp_path / name).write_bytes((run / name).read_bytes())
    damaged = tmp_path / "checkpoints" / "step-00000004"
    for path, problem in (
        (tmp_path, "the run has no checkpoint: train with checkpoint.every=N"),
        (tmp_path / "missing", "missing: no such directory: give the directory of a run, or one of its checkpoints"),
        (damaged, "model.safetensors is not what was written"),
    ):
        if path == damaged:
            damaged.mkdir(parents=True)
            for file in (run / "checkpoints" / damaged.name).iterdir():
                data = bytearray(file.read_bytes())
                data[-1] ^= file.name == "model.safetensors"
                (damaged / file.name).write_bytes(data)
        assert called(monkeypatch, path, "a") == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("error: ")
        assert problem in line
