"""Faults in the middle of a run: the user gets one line that helps, and the run's directory has the reason."""

import json
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from models.llama import Llama
from offload.memory.host_memory import HostArena
from offload.optimizer.adamw import HostAdamW
from offload.streams import registry
from tests import ROOT
from tests.offload.helpers.page_locks import FakeRuntime
from tests.training.helpers.in_process import SMALL_MODEL, components_of, composed, signals_as_before
from training.config.validation import check
from training.data import datasets
from training.run.build import build, build_optimizer
from training.run.loop import train
from training.runs import records
from training.runs.failures import failures_recorded
from training.runs.records import read_metrics, read_summary
from training.settle.components import acquired, attached

SMALL = (
    *SMALL_MODEL, "seq_len=32", "steps=6", "log_every=1", "dataset=stdlib", "dataset.max_tokens=50000",
    "tracking=disabled",
)  # fmt: skip
MODES = {
    "none": (),
    "bounce_linear": ("offload=bounce_linear", "optimizer=host_adamw"),
    "shard_offload": ("offload=shard_offload", "offload.shards=2", "microbatches=2"),
    "layer_stream_swap": ("offload=layer_stream_swap",),
}
pytestmark = pytest.mark.usefixtures("small_activations")
every_mode = pytest.mark.parametrize("mode", MODES)
HOST_ADAMW = ("offload=layer_stream", "optimizer=host_adamw", "clip_norm=null")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., int]]:
    """Trains in `tmp_path` as train.py does, in this process, and returns the exit status."""

    def run(*overrides: str) -> int:
        try:
            config, invocation = composed(*SMALL, *overrides, run_dir=tmp_path)
            with failures_recorded(tmp_path):
                check(config)
                with build(config, invocation) as job:
                    train(job)
        except SystemExit as ended:
            return ended.code
        return 0

    with signals_as_before():
        yield run
    assert registry.holders("cpu") == 0
    ours = ("host optimizer", "lockstep")
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(ours)]


def at_forward(monkeypatch: pytest.MonkeyPatch, number: int, happens: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """In the model's forward number `number`, from 1, `happens` is called on the loss."""
    forward, count = Llama.forward, []

    def forward_with_fault(self, *arguments: object) -> torch.Tensor:
        loss = forward(self, *arguments)
        if loss.is_meta:
            return loss
        count.append(None)
        return happens(loss) if len(count) == number else loss

    monkeypatch.setattr(Llama, "forward", forward_with_fault)


def raising(error: BaseException) -> Callable:
    def happens(*_: object) -> None:
        raise error

    return happens


@every_mode
@pytest.mark.slow
def test_a_loss_that_is_nan_stops_the_run(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys, mode: str):
    at_forward(monkeypatch, 4 if "microbatches=2" not in MODES[mode] else 8, lambda loss: loss * float("nan"))
    assert run(*MODES[mode]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: step 4: the gradient norm is nan, and on_nonfinite=stop: take optimizer.lr=")
    assert error.count("\n") == 1
    assert [record["train/step"] for record in read_metrics(tmp_path)] == [1, 2, 3]
    assert read_summary(tmp_path)["status"] == "failed"


@every_mode
@pytest.mark.slow
def test_a_loss_that_is_nan_is_skipped(run, tmp_path: Path, monkeypatch, mode: str):
    at_forward(monkeypatch, 4 if "microbatches=2" not in MODES[mode] else 8, lambda loss: loss * float("nan"))
    assert run(*MODES[mode], "on_nonfinite=skip") == 0
    records = read_metrics(tmp_path)
    assert [record["train/skipped_steps"] for record in records] == [0, 0, 0, 1, 1, 1]
    losses = torch.tensor([record["train/loss"] for record in records])
    assert losses.isnan().tolist() == [False, False, False, True, False, False]
    assert read_summary(tmp_path)["train/skipped_steps"] == 1


@every_mode
@pytest.mark.parametrize("at", [1, 4])
@pytest.mark.slow
def test_a_gpu_out_of_memory_in_mid_step(run, tmp_path: Path, monkeypatch, capsys, mode: str, at: int):
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity of")
    at_forward(monkeypatch, at, raising(error))
    assert run(*MODES[mode]) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: the GPU is out of memory (2.50 GiB more needed): planned were ")
    assert line.count("\n") == 1
    # The plan's numbers, which are in its file too, and keys to change, three at most.
    planned = json.loads((tmp_path / "plan.json").read_text())["device_bytes"]
    assert f"planned were {planned['total'] / 2**20:.2f} MiB (" in line
    assert f"activations {planned['activations'] / 2**20:.2f} MiB" in line
    assert f"slots {planned['slots'] / 2**20:.2f} MiB" in line or not planned["slots"]
    advice = line.rpartition(": take ")[2].replace(" or ", ", ").strip().split(", ")
    assert 1 <= len(set(advice)) == len(advice) <= 3
    assert read_summary(tmp_path) == {"status": "out_of_memory", "reason": line.removeprefix("error: ").strip()}


@pytest.mark.slow
def test_what_it_advises_can_be_taken(run, monkeypatch, capsys):
    at_forward(monkeypatch, 1, raising(torch.OutOfMemoryError("CUDA out of memory.")))
    assert run("precision=fp32") == 1
    overrides, _, _environment = capsys.readouterr().err.rpartition(": take ")[2].partition("; ")
    advice = overrides.replace(" or ", ", ").strip().split(", ")
    assert run(*(override for override in advice if "=" in override)) == 0


def test_a_full_disk_under_the_metrics(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    appended = []

    def opened(path: Path, mode: str = "r", **options: object):
        if mode == "ab":
            appended.append(path)
        # /dev/full is always full; the third record and later ones go there.
        return open("/dev/full" if len(appended) > 2 and mode == "ab" else path, mode, **options)

    monkeypatch.setattr(records, "open", opened, raising=False)
    assert run() == 1
    line = capsys.readouterr().err
    assert line.startswith(f"error: {tmp_path}: the disk of the run's directory is full; free some space")
    assert line.count("\n") == 1
    assert [record["train/step"] for record in read_metrics(tmp_path)] == [1, 2]
    assert read_summary(tmp_path)["status"] == "failed"


def test_a_data_file_that_vanishes_before_it_is_read(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys):
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 1000)
    find = datasets.find_files

    def found_and_gone(files):
        found = find(files)
        text.unlink()
        return found

    monkeypatch.setattr(datasets, "find_files", found_and_gone)
    assert run("dataset=text", f"dataset.files={text}") == 1
    line = capsys.readouterr().err
    assert line.startswith("error: ")
    assert str(text) in line
    assert line.count("\n") == 1


def test_a_data_file_that_vanishes_later_is_not_missed(run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    text = tmp_path / "text.txt"
    text.write_text("once upon a time " * 1000)
    at_forward(monkeypatch, 3, lambda loss: (text.unlink(), loss)[1])
    assert run("dataset=text", f"dataset.files={text}") == 0
    assert not text.exists()
    assert len(read_metrics(tmp_path)) == 6


@pytest.mark.parametrize("mode", ["bounce_linear", "shard_offload", "layer_stream_swap"])
@pytest.mark.slow
def test_memory_that_cannot_be_page_locked_is_used_as_it_is(run, tmp_path: Path, monkeypatch, mode: str):
    initialise = HostArena.__init__

    def pinning(self, *arguments: object) -> None:
        initialise(self, *arguments)
        self._pin = not self._is_meta

    monkeypatch.setattr(HostArena, "__init__", pinning)
    FakeRuntime(refusal=2).install(monkeypatch)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run(*MODES[mode]) == 0
    warned = [str(warning.message) for warning in caught if "page-locking" in str(warning.message)]
    # One for each arena, not for each block.
    assert 1 <= len(warned) <= 2
    assert "copies fall back to pageable memory, several times slower. Raise `ulimit -l`" in warned[0]
    assert {record["memory/host_pinned_gib"] for record in read_metrics(tmp_path)} == {0}


@pytest.mark.parametrize(
    ("error", "reason", "status"),
    [
        (ArithmeticError("of the update"), "ArithmeticError: of the update", "failed"),
        (MemoryError(), "the host is out of memory: planned were ", "out_of_memory"),
    ],
)
@pytest.mark.slow
def test_a_worker_that_dies_ends_the_run(run, tmp_path: Path, monkeypatch, capsys, error, reason: str, status: str):
    apply, updates = HostAdamW.apply, []

    def failing(self, claims, scale=1.0) -> None:
        if threading.current_thread().name == "host optimizer":
            updates.append(None)
            if len(updates) == 5:
                raise error
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", failing)
    assert run(*HOST_ADAMW) == 1
    assert f"error: {reason}" in capsys.readouterr().err
    summary = read_summary(tmp_path)
    assert summary["status"] == status
    assert summary["reason"].startswith(reason)
    assert len(read_metrics(tmp_path)) < 6


@pytest.mark.parametrize(
    ("name", "overrides"), [("host optimizer", HOST_ADAMW), ("lockstep", ("offload=shard_offload", "microbatches=2"))]
)
def test_a_thread_that_a_mode_needs_and_the_system_refuses_is_one_line(run, monkeypatch, capsys, name: str, overrides):
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith(name):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refused)
    assert run(*overrides) == 1
    line = capsys.readouterr().err
    assert line.startswith("error: the system starts no more threads for this user or container: raise `ulimit -u`")
    assert line.count("\n") == 1


def test_a_host_without_room_for_the_optimizers_states_is_refused_with_both_sizes(monkeypatch: pytest.MonkeyPatch):
    components = components_of(*SMALL, *HOST_ADAMW)
    with acquired(components.device) as streams, attached(components, streams) as found:
        monkeypatch.setattr("offload.optimizer.states.free_host_bytes", lambda: 1000)
        needed = "0.00 GiB of host memory are needed for the optimizer's states, 0.00 GiB are free"
        with pytest.raises(MemoryError, match=needed):
            build_optimizer(components, found)


DRIVER = """
import runpy, sys, torch
from models.llama import Llama
forward = Llama.forward

def out_of_memory(self, *arguments):
    if forward(self, *arguments).is_meta:
        return forward(self, *arguments)
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.50 GiB.")

Llama.forward = out_of_memory
sys.argv = ["train.py", *sys.argv[1:]]
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.mark.slow
def test_a_process_that_runs_out_of_memory_ends_cleanly(tmp_path: Path):
    process = subprocess.run(
        [sys.executable, "-c", DRIVER, *SMALL, *HOST_ADAMW, f"hydra.run.dir={tmp_path}"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert process.returncode == 1
    assert process.stderr.startswith("error: the GPU is out of memory (2.50 GiB more needed): planned were ")
    assert process.stderr.count("\n") == 1
    assert read_summary(tmp_path)["status"] == "out_of_memory"
    assert "Traceback" in (tmp_path / "train.log").read_text()
