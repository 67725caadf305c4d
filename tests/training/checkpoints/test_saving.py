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
from training.checkpoints.saving import Checkpoints, hugging_face_config
from training.checkpoints.state import RunState
from training.errors import UserError
from training.runs import checkpoint_files


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
