"""train.py on the CPU: as a user runs it, and for comparing modes, which takes many runs, within this process."""

import functools
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hydra.errors import InstantiationException

from models.initialise import initialise
from models.llama import Llama
from tests import ROOT
from tests.models.helpers.saving import save_weights
from tests.training.helpers.in_process import SMALL_RUN, command_here, run_here
from tests.training.helpers.modes import moves_activations, small_modes, streams_weights
from tests.training.helpers.wandb_files import summary_of
from training.errors import UserError
from training.run.build import RankJob
from training.runs.failures import explain

# Read from files, for what may depend on how that is done.
STDLIB = ("dataset=stdlib", "dataset.max_tokens=100000")
# For runs in this process.
QUIET = (*SMALL_RUN, "tracking=disabled")
# Every mode there is, with knobs that make it move something of a model as small as this.
MODES = small_modes()
TRANSFERS = ("transfer/", "perf/", "memory/", "optimizer/")


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def curve(folder: Path) -> list[dict]:
    """Returns the values that must not depend on the mode: losses and gradient norms."""
    return [{k: v for k, v in record.items() if not k.startswith(TRANSFERS)} for record in metrics(folder)]


def test_the_default_job_learns(tmp_path: Path):
    run_here(tmp_path, "steps=40", "batch_size=4", "seq_len=128", "device=cpu", "hardware=h200", "tracking=disabled")
    records = metrics(tmp_path)
    assert [record["train/step"] for record in records] == [10, 20, 30, 40]
    # Far from a guess among all bytes, whatever the standard library's files are.
    assert records[-1]["train/loss"] < math.log(256) - 1
    assert summary(tmp_path)["status"] == "ok"


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("precision=fp32",), marks=pytest.mark.slow),
        ("precision=bf16", "recompute=block", "microbatches=3", "clip_norm=null"),
    ],
)
@pytest.mark.usefixtures("small_activations")
def test_every_mode_trains_alike(tmp_path: Path, options: tuple[str, ...]):
    for offload, knobs in MODES.items():
        folder = tmp_path / offload
        run_here(folder, *QUIET, "steps=3", "log_every=1", f"offload={offload}", *knobs, *options)
        moved = summary(folder)
        assert (moved["transfer/h2d_gib"] > 0) == (offload != "none")
        assert ("transfer/stall_ms" in moved) == (offload != "save_on_cpu")
        swaps = moves_activations(offload)
        assert (moved["transfer/activations_d2h_gib"] > 0) == (moved["transfer/activations_h2d_gib"] > 0) == swaps
    assert {offload: curve(tmp_path / offload) for offload in MODES} == dict.fromkeys(MODES, curve(tmp_path / "none"))


@pytest.mark.slow
@pytest.mark.parametrize("clip_norm", ["null", "1.0"])
def test_updates_behind_the_step_train_alike(tmp_path: Path, clip_norm: str):
    """Half of the modes with each; tests/training/evaluation/test_held_out.py has all modes without clipping."""
    modes = {name: MODES[name] for name in ("none", *list(MODES)[clip_norm == "null" :: 2])}
    # A rate that changes with each step, so that an update that is made late is still the one of its own step.
    schedule = ("schedule=linear", "schedule.warmup=2", "log_every=1")
    for offload, knobs in modes.items():
        updates = ("optimizer=host_adamw", f"clip_norm={clip_norm}", "precision=bf16", "microbatches=2", *schedule)
        run_here(tmp_path / offload, *QUIET, f"offload={offload}", *knobs, *updates)
        # In all, because an update may be made in the step after its own.
        host_ms = sum(record["optimizer/host_ms"] for record in metrics(tmp_path / offload))
        assert (host_ms > 0) == streams_weights(offload)
    curves = {offload: curve(tmp_path / offload) for offload in modes}
    assert curves == dict.fromkeys(modes, curves["none"])
    rates = [record["train/lr"] / 0.002 for record in curves["none"]]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 3 / 4, 2 / 4, 1 / 4])


def test_states_that_fill_the_spare_device_memory_train_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """After the first step: no states, a third of them, all. A CPU does not tell what a step leaves, so this does."""
    shares = {}
    for spare in (0, 120 * 2**10, 2**30):
        with monkeypatch.context() as patch:
            place = functools.partial(_place_states, nbytes=spare)
            patch.setattr("training.run.loop.place_states_in_spare_vram", place)
            updates = ("optimizer=host_adamw", "optimizer.device_share=auto", "clip_norm=null")
            run_here(tmp_path / str(spare), *QUIET, "offload=layer_stream", "precision=bf16", *updates)
        shares[spare] = sum(record["optimizer/host_ms"] > 0 for record in metrics(tmp_path / str(spare))[1:])
    none, some, every = shares
    assert curve(tmp_path / str(none)) == curve(tmp_path / str(some)) == curve(tmp_path / str(every))
    assert shares[none] == shares[some] > shares[every] == 0


def _place_states(job: RankJob, nbytes: int) -> None:
    job.attached.trained.place_states(nbytes)


def test_a_run_of_its_own_writes_to_its_directory_only_as_wandb_has_it_and_is_a_function_of_its_seed(tmp_path: Path):
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    # Another test may import train.py meanwhile.
    before = {*ROOT.iterdir(), ROOT / "__pycache__"}
    scrubbed = dict.fromkeys(("WANDB_API_KEY", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), "")
    environment = {"HOME": str(home), "WANDB_MODE": "offline", "PYTHONHASHSEED": "9", **scrubbed}
    environment["PYTHONPROFILEIMPORTTIME"] = "1"
    job = (*SMALL_RUN, *STDLIB, "offload=bounce_linear", "seed=3", f"hydra.run.dir={folder}")
    command = [sys.executable, "train.py", *job]
    run = subprocess.run(
        command, cwd=ROOT, env=os.environ | environment, check=True, timeout=300, stderr=subprocess.PIPE, text=True
    )
    # That takes seconds, and nobody compiles anything.
    assert " torch\n" in run.stderr
    assert "torch._dynamo" not in run.stderr
    assert not list(home.rglob("*"))
    assert {*ROOT.iterdir(), ROOT / "__pycache__"} == before
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.jsonl", "summary.json", "config.yaml", "choices.yaml", "train.log", "wandb"} <= names
    assert ".hydra" not in names
    (sync_dir,) = (folder / "wandb").glob("offline-run-*")
    read = summary_of(sync_dir)
    # The summary has the statistics of the run, and for other metrics the values of the last record.
    written = {**metrics(folder)[-1], **summary(folder)}
    expected = {key: value for key, value in written.items() if value is not None}
    assert {key: read["summary"][key] for key in expected} == expected
    assert read["config"]["choices"]["offload"] == "bounce_linear"
    for seed in (3, 4):
        run_here(tmp_path / str(seed), *QUIET, *STDLIB, "offload=none", f"seed={seed}")
    assert curve(folder) == curve(tmp_path / "3") != curve(tmp_path / "4")


@pytest.mark.slow
def test_weights_saved_by_name_load_into_any_mode(tmp_path: Path):
    model = Llama(320, 32, 64, 2, 4, 2)
    initialise(model, seed=5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    save_weights(model, tmp_path / "weights")
    for offload in MODES:
        folder = tmp_path / offload
        run_here(
            folder, *QUIET, f"offload={offload}", f"model.weights={tmp_path / 'weights'}", "steps=1", "log_every=1"
        )
        # A head of zeros gives every token the same chance.
        assert metrics(folder)[0]["train/loss"] == pytest.approx(torch.tensor(320.0).log().item())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.weights=nowhere.safetensors",), r"model.weights=nowhere.safetensors: does not exist: give"),
        (("dataset=text", "dataset.files=nowhere/*.txt"), r"dataset.files.*nowhere/\*.txt"),
        (("model.vocab_size=100",), r"has 257 ids, and the model 100: take model.vocab_size=257"),
        (("offload=bounce_linear", "offload.resident=99"), r"offload.resident=99: the model has"),
        (("offload=layer_stream", "offload.layers=blocks"), r"offload.layers=blocks: no list of blocks there"),
        (("offload=layer_stream_swap", "offload.weights.layers=blocks"), r"weights.layers=blocks: no list of"),
        (("offload=shard_offload", "offload.shards=3"), r"offload.shards=3: must be between 1 and .* blocks, 2"),
        (("seq_len=200000",), r"one block of seq_len \+ 1 = 200001"),
    ],
)
def test_a_mistake_is_one_line_that_the_user_can_mend(tmp_path: Path, overrides: tuple[str, ...], message: str):
    with pytest.raises((UserError, InstantiationException)) as raised:
        run_here(tmp_path / "run", *QUIET, *STDLIB, *overrides)
    status, reason, fixable = explain(raised.value)
    assert re.search(message, reason), reason
    assert "\n" not in reason
    assert (status, fixable) == ("failed", True)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("offload=bounce_linear", "offload.resident=99"), r"error: offload.resident=99: the model has"),
        (("offload=bounce_linaer",), r"error: offload=bounce_linaer.*bounce_linear"),
        (("step=3",), r"error: step: unknown key. Did you mean steps"),
        (("device=cuda:77",), r"error: device=cuda:77: "),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, overrides: tuple[str, ...], message: str):
    result = command_here(*QUIET, *overrides, f"hydra.run.dir={tmp_path}")
    assert result.returncode == 1
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    if (tmp_path / "summary.json").exists():
        assert summary(tmp_path)["status"] == "failed"
