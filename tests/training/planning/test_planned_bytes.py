"""On the CPU a plan predicts to the byte what a run copies in a step."""

import json
from pathlib import Path

import pytest
from safetensors.torch import load_file

from offload.modes import tensor_swap
from tests.training.helpers.in_process import SMALL_MODEL, run_here
from training.config.modes import mode_options

MODES = tuple(mode_options())
KEYS = (
    "transfer/h2d_gib", "transfer/d2h_gib", "transfer/activations_h2d_gib", "transfer/activations_d2h_gib",
)  # fmt: skip
JOB = ("steps=2", "warmup_steps=1", "log_every=1", "seq_len=32", "dataset=synthetic", "tracking=disabled")
# Groups of query heads share a key, which attention then saves once.
HEADS = ("model.num_attention_heads=4", "model.num_key_value_heads=2")


@pytest.fixture(autouse=True)
def little_in_flight(monkeypatch: pytest.MonkeyPatch):
    """Otherwise small activations would all be used before their memory is released, and none would be copied in."""
    monkeypatch.setattr(tensor_swap, "IN_FLIGHT_BYTES", 2**14)
    monkeypatch.setattr(tensor_swap, "MIN_BYTES", 2**12)


def moved(folder: Path, mode: str, *overrides: str) -> dict[str, float]:
    """Returns what a run under `mode` measures, and checks that it was planned."""
    summary = run_here(folder, *SMALL_MODEL, *JOB, *HEADS, f"offload={mode}", *overrides)
    measured = {key: summary[key] for key in KEYS}
    assert {key: summary[f"planned/{key}"] for key in KEYS} == measured
    return measured


@pytest.mark.parametrize(("precision", "recompute"), [("fp32", "block"), ("bf16", "none")])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.slow
def test_planned_bytes_are_measured(tmp_path: Path, mode: str, precision: str, recompute: str):
    measured = moved(tmp_path, mode, f"precision={precision}", f"recompute={recompute}", "microbatches=2")
    if mode != "none":
        assert min(measured["transfer/h2d_gib"], measured["transfer/d2h_gib"]) > 0


@pytest.mark.parametrize("share", ["0", pytest.param("300KiB", marks=pytest.mark.slow)])
@pytest.mark.parametrize("gradients", ["keep", "release"])
def test_of_updates_inside_backward(tmp_path: Path, gradients: str, share: str):
    """Gradients of states on the device do not leave it where they are released; new weights do in any case."""
    chosen = (f"optimizer.gradients={gradients}", f"optimizer.device_share={share}")
    moved(tmp_path, "layer_stream", "clip_norm=null", "microbatches=1", *chosen)


@pytest.mark.parametrize("mode", ["tensor_swap", "layer_stream_swap", "shard_offload"])
def test_of_microbatches_that_are_not_alike(tmp_path: Path, mode: str):
    """More microbatches than the dry run computes, of two sequences and of one."""
    moved(tmp_path, mode, "batch_size=11", "microbatches=6")


@pytest.mark.parametrize("head", ["own", "tied"])
@pytest.mark.slow
def test_of_shards_that_hold_what_is_outside_the_blocks(tmp_path: Path, head: str):
    """The embedding and the head come in once for all microbatches."""
    asked = ("offload.outside=stream", "offload.shard_bytes=1", f"model.tie_word_embeddings={head == 'tied'}")
    once = moved(tmp_path / "1", "shard_offload", *asked)
    assert moved(tmp_path / "4", "shard_offload", *asked, "microbatches=4") == once


@pytest.mark.parametrize("mode", ["bounce_linear", "layer_stream", "layer_stream_swap", "shard_offload"])
@pytest.mark.slow
def test_of_an_adapter_beside_frozen_weights(tmp_path: Path, mode: str):
    measured = moved(tmp_path, mode, "adapter=dora", "adapter.rank=2", "microbatches=2", "recompute=block")
    assert measured["transfer/d2h_gib"] == measured["transfer/activations_d2h_gib"]
    assert measured["transfer/h2d_gib"] > measured["transfer/activations_h2d_gib"]


@pytest.mark.parametrize(
    "keys",
    [
        ("offload=layer_stream", "optimizer.master=stochastic", "optimizer.state_dtype=int8", "precision=bf16"),
        ("offload=none", "adapter=lora", "adapter.rank=64", "ema=0.9"),
    ],
    ids=["all", "adapter"],
)
def test_of_a_checkpoint(tmp_path: Path, keys: tuple[str, ...]):
    run_here(tmp_path, *SMALL_MODEL, *JOB, *keys, "checkpoint.every=2")
    files = set(tmp_path.glob("checkpoints/*/*.safetensors")) - set(tmp_path.glob("checkpoints/*/random.safetensors"))
    stored = sum(tensor.nbytes for file in files for tensor in load_file(file).values())
    assert json.loads((tmp_path / "plan.json").read_text())["checkpoint_bytes"] == stored
