"""Saving checkpoints: at whatever moment a process or the disk fails, the earlier ones stay complete."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from omegaconf import OmegaConf
from torch import nn

from models import whole_folder
from offload.optimizer.adamw import HostAdamW
from offload.streams import registry
from tests.training.helpers.in_process import composed
from training.checkpoints import saving
from training.checkpoints.saving import Best, Checkpoints, hugging_face_config
from training.checkpoints.state import RunState
from training.errors import UserError
from training.evaluation.held_out import Evaluation
from training.run.recorder import Recorder
from training.runs import checkpoint_files
from training.runs.checkpoint_files import folder_of
from training.runs.records import read_summary
from training.saved_runs.finding import found, newest_checkpoint


class CrashError(BaseException):
    """Stands for a process that is killed: no code handles it."""


class Trap:
    """Fails the `at`-th time that anything is done to the disk, a write after half of its bytes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException]):
        self.count = 0
        self._at, self._error, self._lock = at, error, threading.Lock()
        monkeypatch.setattr(whole_folder, "open", self._open, raising=False)
        for owner, name in ((os, "fsync"), (Path, "rename"), (Path, "mkdir"), (shutil, "rmtree")):
            monkeypatch.setattr(owner, name, self._failing(getattr(owner, name)))

    def springs(self) -> bool:
        with self._lock:
            self.count += 1
            return self.count == self._at

    def error(self) -> BaseException:
        return self._error()

    def _failing(self, function: Callable) -> Callable:
        def failing(*arguments: Any, **options: Any) -> Any:
            if self.springs():
                raise self.error()
            return function(*arguments, **options)

        return failing

    def _open(self, path: Path, mode: str) -> TrappedFile:
        return TrappedFile(open(path, mode), self)


class TrappedFile:
    def __init__(self, file: Any, trap: Trap):
        self._file, self._trap = file, trap

    def __enter__(self) -> TrappedFile:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, data: bytes | memoryview) -> None:
        if self._trap.springs():
            self._file.write(memoryview(data)[: len(data) // 2])
            raise self._trap.error()
        self._file.write(data)


def full() -> OSError:
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def checkpoints(tmp_path: Path) -> Iterator[Checkpoints]:
    """Checkpoints in `tmp_path` of a model that is one layer; two are kept."""
    model = nn.Linear(3, 2, dtype=torch.bfloat16)
    optimizer = HostAdamW(model.parameters())
    optimizer.allocate()
    config = OmegaConf.create({"steps": 9, "checkpoint": {"every": 4, "keep": 2, "best": None, "on_signal": None}})
    streams = registry.acquire("cpu")
    yield Checkpoints(config, tmp_path, model, optimizer, streams)
    registry.release(streams)


def whole(run_dir: Path) -> list[int]:
    """Returns the steps of the checkpoints, the newest first, and verifies them."""
    found = checkpoint_files.checkpoints_in(run_dir / "checkpoints")
    for folder in found:
        checkpoint_files.verify(folder, checkpoint_files.read_manifest(folder))
    return [checkpoint_files.step_of(folder) for folder in found]


def names(run_dir: Path) -> list[str]:
    return sorted(path.name for path in (run_dir / "checkpoints").iterdir())


def test_the_newest_are_kept(tmp_path: Path, checkpoints: Checkpoints):
    for step in (1, 2, 3, 12):
        assert checkpoints.save(RunState(step)) > 0
    assert names(tmp_path) == ["step-00000003", "step-00000012"]
    assert whole(tmp_path) == [12, 3]
    assert checkpoints.latest().name == "step-00000012"


def test_due_every_so_many_steps_and_after_the_last(checkpoints: Checkpoints):
    assert [step for step in range(1, 10) if checkpoints.due(step)] == [4, 8, 9]


def test_a_crash_at_any_moment_leaves_what_was_there_whole(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    checkpoints.save(RunState(1))
    checkpoints.save(RunState(2))
    saved_anyway = 0
    for at in range(1, 1000):
        with monkeypatch.context() as patch:
            trap = Trap(patch, at, CrashError)
            try:
                checkpoints.save(RunState(3))
            except CrashError:
                pass
            else:
                break
        assert trap.count >= at
        steps = whole(tmp_path)
        assert steps in ([2, 1], [3, 2, 1], [3, 2])
        saved_anyway += steps[0] == 3
        # The next save takes away what this one has left.
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000003", ignore_errors=True)
        checkpoints.save(RunState(1))
        checkpoints.save(RunState(2))
        assert names(tmp_path) == ["step-00000001", "step-00000002"]
    # Each of the six files is opened, written and made durable, and two folders are.
    assert at > 20
    assert saved_anyway >= 2
    assert whole(tmp_path) == [3, 2]


def test_a_full_disk_at_any_moment_costs_one_checkpoint(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpoints.save(RunState(1))
    for at in range(1, 1000):
        caplog.clear()
        with monkeypatch.context() as patch:
            Trap(patch, at, full)
            if checkpoints.save(RunState(2)) is not None:
                break
        *_, warning = [record for record in caplog.records if record.levelno == logging.WARNING]
        assert re.search(r"step-00000002 could not be saved \(No space left.*the run continues", warning.getMessage())
        if whole(tmp_path) == [1]:
            assert names(tmp_path) == ["step-00000001"]
        shutil.rmtree(tmp_path / "checkpoints" / "step-00000002", ignore_errors=True)
    assert at > 20


def test_a_full_disk_where_the_checkpoint_is_required_is_one_line(
    checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    Trap(monkeypatch, 9, full)
    with pytest.raises(UserError, match=r"could not be saved .*free some space"):
        checkpoints.save(RunState(2), required=True)


def test_what_a_killed_process_left_is_removed_and_nothing_else(tmp_path: Path, checkpoints: Checkpoints):
    for step in (1, 2, 3, 4):
        folder = tmp_path / "checkpoints" / f"step-{step:08d}"
        checkpoints.save(RunState(step))
        shutil.copytree(folder, tmp_path / folder.name)
    for step in (1, 2):
        (tmp_path / f"step-{step:08d}").rename(tmp_path / "checkpoints" / f"step-{step:08d}")
    for name in ("step-00000001.partial", "step-00000009.partial", "step-00000004.aside", "mine"):
        (tmp_path / "checkpoints" / name).mkdir()
    checkpoints.remove_leftovers(3)
    assert names(tmp_path) == ["mine", "step-00000002", "step-00000003", "step-00000004", "step-00000004.aside"]
    assert whole(tmp_path) == [4, 3, 2]
    checkpoints.remove_leftovers(4)
    assert whole(tmp_path) == [4, 3]


def test_room_is_made_before_a_checkpoint_is_written(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    for step in (1, 2, 3):
        checkpoints.save(RunState(step))
    shutil.copytree(tmp_path / "checkpoints" / "step-00000002", tmp_path / "checkpoints" / "step-00000001")
    found = []
    write = saving.write_folder
    monkeypatch.setattr(
        saving, "write_folder", lambda *arguments: (found.extend(names(tmp_path)), write(*arguments))[1]
    )
    checkpoints.save(RunState(4))
    assert found == ["step-00000002", "step-00000003"]


def test_what_cannot_be_removed_is_a_warning(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    checkpoints.save(RunState(1))
    checkpoints.save(RunState(2))
    monkeypatch.setattr(saving, "remove_folder", lambda folder: (_ for _ in ()).throw(full()))
    assert checkpoints.save(RunState(3)) is not None
    assert whole(tmp_path) == [3, 2, 1]
    assert "step-00000001 could not be removed" in caplog.text


def test_what_has_a_checkpoint_s_name_is_left_and_named(
    tmp_path: Path, checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture
):
    checkpoints.save(RunState(1))
    checkpoints.save(RunState(2))
    (tmp_path / "checkpoints" / "step-00000009").mkdir()
    (tmp_path / "checkpoints" / "step-00000009" / "file").write_text("precious")
    assert checkpoints.save(RunState(9)) is None
    assert "step-00000009 could not be saved (something of this name is there: move it away): the run" in caplog.text
    with pytest.raises(UserError) as refusal:
        checkpoints.save(RunState(9), required=True)
    assert "there: move it away): fix that, or choose" in str(refusal.value)
    assert names(tmp_path) == ["step-00000001", "step-00000002", "step-00000009"]
    assert checkpoints.save(RunState(10)) is not None


def test_large_models_are_sharded_as_hugging_face_does(
    tmp_path: Path, checkpoints: Checkpoints, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(saving, "MAX_SHARD_BYTES", 14)
    checkpoints.save(RunState(1))
    folder = tmp_path / "checkpoints" / "step-00000001"
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index == {
        "metadata": {"total_size": 16},
        "weight_map": {"weight": "model-00001-of-00002.safetensors", "bias": "model-00002-of-00002.safetensors"},
    }
    assert len(list(folder.glob("optimizer-*-of-*.safetensors"))) > 1
    assert whole(tmp_path) == [1]


@pytest.mark.parametrize(("precision", "dtype"), [("bf16", "bfloat16"), ("fp32", "float32")])
def test_a_config_json_describes_the_model_of_the_run(precision: str, dtype: str):
    config, _ = composed("model=llama7b", "seq_len=2048", f"precision={precision}", "model.rope_theta=500000")
    values = json.loads(hugging_face_config(config))
    assert (values["architectures"], values["model_type"]) == (["LlamaForCausalLM"], "llama")
    assert (values["hidden_size"], values["num_hidden_layers"], values["rope_theta"]) == (4096, 32, 500000)
    assert (values["max_position_embeddings"], values["torch_dtype"]) == (2048, dtype)
    assert "weights" not in values


SPLIT = "dataset.eval_share=0.05"
EVALUATES = ("checkpoint.best=eval/loss", "eval.every=1", "eval.batches=1", "checkpoint.keep=1", SPLIT)


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch, run_here) -> Callable[..., dict]:
    """Runs with `losses` as those of the evaluations, the first before the first step that the run makes."""

    def scored(folder: Path, losses: list[float], *overrides: str) -> dict:
        left = list(losses)
        monkeypatch.setattr(Evaluation, "metrics", lambda *_: {"eval/loss": left.pop(0), "eval/ms": 1.0})
        return run_here(folder, *EVALUATES, "checkpoint.every=null", *overrides)

    return scored


def saved(folder: Path) -> dict[str, str | None]:
    """Returns what is in the folder of checkpoints, with the target of each link."""
    return {
        path.name: os.readlink(path) if path.is_symlink() else None
        for path in sorted((folder / "checkpoints").iterdir())
    }


def test_the_best_is_kept_beside_the_newest(tmp_path: Path, scored, monkeypatch: pytest.MonkeyPatch):
    steps, save = [], Recorder.save
    monkeypatch.setattr(
        Recorder, "save", lambda self, step, *given, **keys: steps.append(step) or save(self, step, *given, **keys)
    )
    # The smallest, before the first step, is no checkpoint's; what is no number, or as good as another, is not better.
    losses = [0.5, 3.0, 2.0, float("nan"), 2.0, 2.5, 4.0]
    done = scored(tmp_path, losses, "checkpoint.every=4")
    # Step 4 is due, and 6 is the last.
    assert steps == [1, 2, 4, 6]
    assert saved(tmp_path) == {"best": "step-00000002", "step-00000002": None, "step-00000006": None}
    assert done["checkpoint/best_step"] == read_summary(tmp_path)["checkpoint/best_step"] == 2
    assert newest_checkpoint(tmp_path).name == "step-00000006"
    assert found(str(tmp_path / "checkpoints" / "best")) == (tmp_path, tmp_path / "checkpoints" / "step-00000002")


def test_a_resumed_run_knows_the_best(tmp_path: Path, scored, at):
    scored(tmp_path, [9.0, 3.0, 2.0, 5.0, 6.0], "steps=4", "checkpoint.every=4")
    assert saved(tmp_path) == {"best": "step-00000002", "step-00000002": None, "step-00000004": None}
    scored(tmp_path, [2.5, 1.0], "resume=auto", "checkpoint.every=2")
    assert saved(tmp_path) == {"best": "step-00000006", "step-00000006": None}
    # From the one before the best: that is set aside, and the link does not lead to nothing.
    other = tmp_path / "other"
    scored(other, [9.0, 3.0, 4.0, 2.0, 6.0], "steps=4", "checkpoint.every=1", "checkpoint.keep=9")
    assert saved(other)["best"] == "step-00000003"
    scored(other, [5.0], "steps=3", f"resume={at(other, 2)}")
    assert saved(other)["best"] == "step-00000001"
    # Where no best one is asked for, none is kept.
    scored(other, [5.0, 5.0], "steps=4", "resume=auto", "checkpoint.best=null", "checkpoint.every=4")
    assert saved(other).keys() == {"step-00000003.aside", "step-00000004.aside", "step-00000004"}


def test_the_best_can_be_resumed_from(tmp_path: Path, scored):
    scored(tmp_path, [9.0, 3.0, 2.0, 5.0, 6.0], "steps=4", "checkpoint.every=4")
    scored(tmp_path, [4.0, 1.5], "steps=4", f"resume={tmp_path}/checkpoints/best")
    assert saved(tmp_path)["best"] == "step-00000004"
    elsewhere = tmp_path / "elsewhere"
    scored(elsewhere, [7.0, 8.0, 9.0], "steps=6", f"resume={tmp_path}/checkpoints/best")
    # Better ones in another directory are not this run's.
    assert saved(elsewhere) == {"best": "step-00000005", "step-00000005": None}


def test_a_larger_accuracy_is_better(tmp_path: Path):
    records = [{"train/step": step, "eval/accuracy": 0.1 * step, "eval/loss": 0.1 * step} for step in (1, 2)]
    for metric, step in (("eval/accuracy", 2), ("eval/loss", 1)):
        best = Best(metric, tmp_path / metric)
        for record in records:
            best.add(record)
            if best.wants(record["train/step"]):
                folder_of(tmp_path / metric, record["train/step"]).mkdir(parents=True)
                best.saved(record["train/step"])
        assert best.step == step


def test_a_checkpoint_that_the_disk_refuses_is_not_the_best(tmp_path: Path):
    best = Best("eval/loss", tmp_path)
    best.add({"train/step": 1, "eval/loss": 1.0})
    assert best.wants(1)
    best.add({"train/step": 2, "eval/loss": 2.0})
    assert (best.wants(1), best.wants(2)) == (False, True)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("eval.every=null",), r"checkpoint\.best=eval/loss: the run does not evaluate: give eval\.every=N, or check"),
        (("checkpoint.best=loss",), r"checkpoint\.best=loss: the run measures eval/loss: choose one, or null$"),
        (("checkpoint.best=eval/accuracy",), r"checkpoint\.best=eval/accuracy: the run measures eval/loss: choose"),
    ],
)
def test_what_a_run_does_not_measure_is_refused(tmp_path: Path, run_here, keys: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=f"^{message}"):
        run_here(tmp_path, *EVALUATES, *keys)
