"""train.py as a user runs it, on the CPU."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SMALL = (
    "model.hidden_size=32",
    "model.intermediate_size=64",
    "model.num_hidden_layers=2",
    "batch_size=4",
    "seq_len=64",
    "steps=6",
    "log_every=2",
    "warmup_steps=1",
    "device=cpu",
    "dataset.max_tokens=100000",
)
TRANSFERS = ("transfer/", "perf/", "memory/")


def run(folder: Path, *overrides: str, status: int = 0, **environment: str) -> subprocess.CompletedProcess[str]:
    """`python train.py` with `overrides`, its directory being `folder`."""
    where = "hydra.sweep.dir" if "-m" in overrides else "hydra.run.dir"
    result = subprocess.run(
        [sys.executable, "train.py", *overrides, f"{where}={folder}"],
        cwd=ROOT,
        env={**os.environ, "WANDB_MODE": "disabled", **environment},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == status, result.stdout + result.stderr
    return result


def metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict:
    return json.loads((folder / "summary.json").read_text())


def curve(folder: Path) -> list[dict]:
    """What must not depend on the mode: losses and gradient norms."""
    return [{k: v for k, v in record.items() if not k.startswith(TRANSFERS)} for record in metrics(folder)]


def test_the_default_job_learns(tmp_path: Path):
    run(tmp_path, "steps=60", "batch_size=4", "device=cpu")
    records = metrics(tmp_path)
    assert [record["train/step"] for record in records] == [10, 20, 30, 40, 50, 60]
    assert records[-1]["train/loss"] < records[0]["train/loss"] - 0.3
    assert summary(tmp_path)["status"] == "ok"


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("options", [(), ("recompute=block", "microbatches=3", "clip_norm=null")])
def test_every_mode_trains_alike(tmp_path: Path, precision: str, options: tuple[str, ...]):
    curves = {}
    for offload in ("none", "bounce_linear", "layer_stream"):
        folder = tmp_path / offload
        run(folder, *SMALL, f"precision={precision}", f"offload={offload}", *options)
        curves[offload] = curve(folder)
        moved = summary(folder)["transfer/h2d_gib"]
        assert (moved == 0) == (offload == "none")
    assert curves["none"] == curves["bounce_linear"] == curves["layer_stream"]


def test_a_run_is_a_function_of_its_seed(tmp_path: Path):
    for folder, seed in (("one", 3), ("again", 3), ("other", 4)):
        run(tmp_path / folder, *SMALL, f"seed={seed}", PYTHONHASHSEED=str(len(folder)))
    assert curve(tmp_path / "one") == curve(tmp_path / "again") != curve(tmp_path / "other")


def test_a_run_writes_to_its_directory_only(tmp_path: Path):
    home, folder = tmp_path / "home", tmp_path / "run"
    home.mkdir()
    before = set(ROOT.iterdir())
    scrubbed = dict.fromkeys(("WANDB_API_KEY", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "HF_HOME"), "")
    run(folder, *SMALL, HOME=str(home), WANDB_MODE="offline", **scrubbed)
    assert not list(home.rglob("*"))
    assert set(ROOT.iterdir()) == before
    names = {path.name for path in folder.iterdir()}
    assert {"metrics.jsonl", "summary.json", "config.yaml", "train.log", "wandb", ".hydra"} <= names


def test_wandb_has_what_the_files_have(tmp_path: Path):
    run(tmp_path, *SMALL, "offload=bounce_linear", "tracking=offline", WANDB_MODE="offline")
    (sync_dir,) = (tmp_path / "wandb").glob("offline-run-*")
    command = [sys.executable, "-m", "wandb", "leet", "inspect", "--summary", "--json", sync_dir]
    read = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    # The summary's figures stand for the run; what it does not sum up is that of the last record.
    written = {**metrics(tmp_path)[-1], **summary(tmp_path)}
    expected = {key: value for key, value in written.items() if value is not None}
    assert {key: read["summary"][key] for key in expected} == expected
    assert read["config"]["choices"]["offload"] == "bounce_linear"


def test_weights_saved_by_name_load_into_any_mode(tmp_path: Path):
    import torch

    from models.initialise import initialise
    from models.llama import Llama
    from models.weights import save_weights

    model = Llama(320, 32, 64, 2, 4, 2)
    initialise(model, seed=5)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    save_weights(model, tmp_path / "weights")
    for offload in ("none", "bounce_linear"):
        folder = tmp_path / offload
        run(folder, *SMALL, f"offload={offload}", f"model.weights={tmp_path / 'weights'}", "steps=1", "log_every=1")
        # A head of zeros gives every token the same chance.
        assert metrics(folder)[0]["train/loss"] == pytest.approx(torch.tensor(320.0).log().item())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (("model.weights=nowhere.safetensors",), r"error: model.weights=nowhere.safetensors: .*nowhere"),
        (("dataset=text", "dataset.files=nowhere/*.txt"), r"error: dataset.files.*nowhere/\*.txt"),
        (("model.vocab_size=100",), r"error: model.vocab_size=100 is smaller than the tokenizer's 257"),
        (("offload=bounce_linear", "offload.resident=99"), r"error: offload.resident=99: the model has"),
        (("offload=layer_stream", "offload.layers=blocks"), r"error: offload.layers=blocks: no list of blocks there"),
        (("recompute=block", "recompute.blocks=blocks"), r"error: recompute.blocks=blocks: no list of blocks there"),
        (("seq_len=200000",), r"error: .*one block of seq_len \+ 1 = 200001"),
        (
            ("offload=layer_stream", "model.intermediate_size=100000000000"),
            r"GiB of host memory are needed, .* are free",
        ),
        (("offload=bounce_linaer",), r"error: offload=bounce_linaer.*bounce_linear"),
        (("step=3",), r"error: step is no key.*Did you mean steps"),
    ],
)
def test_a_mistake_is_one_line(tmp_path: Path, overrides: tuple[str, ...], message: str):
    result = run(tmp_path, *SMALL, *overrides, status=1)
    assert re.search(message, result.stderr), result.stderr
    assert "Traceback" not in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    if (tmp_path / "summary.json").exists():
        assert summary(tmp_path)["status"] == "failed"


def test_an_absent_gpu_is_one_line(tmp_path: Path):
    result = run(tmp_path, *SMALL, "device=cuda:7", status=1, CUDA_VISIBLE_DEVICES="")
    assert result.stderr.startswith("error: device=cuda:7: ")


def test_a_sweep_keeps_modes_apart_and_goes_on_after_a_failure(tmp_path: Path):
    result = run(tmp_path, "-m", *SMALL, "offload=none,bounce_linear", "model.vocab_size=320,100", "steps=2", status=1)
    assert [summary(tmp_path / str(job))["status"] for job in range(4)] == ["ok", "failed", "ok", "failed"]
    assert "smaller than the tokenizer" in " ".join(result.stdout.split())
    assert curve(tmp_path / "0") == curve(tmp_path / "2")
