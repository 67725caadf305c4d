"""Runs whose frozen weights stay in their files: the losses of memory, plans, resumed runs, and refusals."""

import json
import os
from pathlib import Path

import pytest

from models.initialise import initialise
from models.weights import INDEX_FILE
from tests.models.helpers.saving import save_weights
from tests.training.helpers.in_process import TINY_RUN, components_of, run_here
from tests.training.helpers.results import losses
from training.errors import UserError
from training.optim import build_schedule
from training.runs.failures import explain
from training.weights.mapped import mapped_note

RUN = (*TINY_RUN, "steps=3", "log_every=1", "seq_len=16", "adapter=lora")
MAPPED = (*RUN, "offload=layer_stream", "offload.source=mapped")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of the tiny model in several files."""
    model = components_of(*TINY_RUN).model.to_empty(device="cpu")
    initialise(model, 0)
    folder = tmp_path_factory.mktemp("weights") / "files"
    save_weights(model, folder, max_shard_bytes=10_000)
    return folder


@pytest.mark.slow
def test_losses_are_those_of_memory_and_the_plan_counts_the_ring(tmp_path: Path, weights: Path):
    run_here(tmp_path / "memory", *RUN, "offload=layer_stream", f"model.weights={weights}")
    run_here(tmp_path / "mapped", *MAPPED, f"model.weights={weights}", "checkpoint.every=2")
    assert losses(tmp_path / "mapped") == losses(tmp_path / "memory")
    plan = json.loads((tmp_path / "mapped" / "plan.json").read_text())
    assert plan["host_bytes"]["weights"] == 0
    assert plan["host_bytes"]["read ahead"] > 0
    assert any(note.startswith("offload.source=mapped: ") for note in plan["notes"])
    line = json.loads((tmp_path / "mapped" / "metrics.jsonl").read_text().splitlines()[-1])
    assert line["transfer/files_gib"] > 0

    checkpoint = tmp_path / "mapped" / "checkpoints" / "step-00000002"
    assert not (checkpoint / "model.safetensors").exists()
    run_here(tmp_path / "rest", *MAPPED, f"model.weights={weights}", f"resume={checkpoint}")
    assert losses(tmp_path / "rest") == losses(tmp_path / "memory")[2:]


@pytest.mark.slow
def test_quantised_weights_are_read_from_their_cache(tmp_path: Path, weights: Path):
    keys = (f"model.weights={weights}", "quantize=int8")
    with pytest.raises(UserError, match="no unit that streams lies in the files as a whole"):
        components_of(*MAPPED, *keys)
    run_here(tmp_path / "memory", *RUN, "offload=layer_stream", *keys)
    again = components_of(*MAPPED, *keys).footprint
    assert again.file_bytes == again.host_weight_bytes
    run_here(tmp_path / "mapped", *MAPPED, *keys)
    assert losses(tmp_path / "mapped") == losses(tmp_path / "memory")
    for cache in weights.glob("*.quantised"):
        cache.unlink()


def test_a_file_that_changes_ends_the_run_with_one_line(tmp_path: Path, weights: Path, monkeypatch):
    index = json.loads((weights / INDEX_FILE).read_text())["weight_map"]
    file = weights / index["model.layers.1.mlp.up_proj.weight"]
    before = file.stat()

    def truncating(config, optimizer):
        os.truncate(file, 100)
        return build_schedule(config, optimizer)

    monkeypatch.setattr("training.run.build.build_schedule", truncating)
    content = file.read_bytes()
    try:
        with pytest.raises(OSError, match="now while its weights are read") as error:
            run_here(tmp_path / "run", *MAPPED, f"model.weights={weights}")
        failure = explain(error.value)
        assert failure.fixable
        assert str(file) in failure.reason
        assert "100 now" in failure.reason
    finally:
        file.write_bytes(content)
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (("model.weights=null",), "model.weights=null has none: give model.weights=PATH"),
        (("adapter=none",), "here all train: train an adapter"),
        (("devices=2", "batch_size=4"), "is for one device so far"),
        (("precision=bf16",), "they are F32 in the files, and torch.bfloat16 here; take offload.source=memory"),
        (("offload.trained=stream",), "no unit that streams lies in the files as a whole"),
        (("model.num_hidden_layers=1",), "model.weights=.*: .* which the model lacks"),
    ],
)
@pytest.mark.slow
def test_refusals_name_the_key_and_what_to_do(weights: Path, keys: tuple[str, ...], message: str):
    with pytest.raises(UserError, match=message):
        components_of(*MAPPED, f"model.weights={weights}", *keys)


def test_a_checkpoint_of_a_whole_model_is_not_mapped(tmp_path: Path, weights: Path):
    keys = (*TINY_RUN, "steps=2", "quantize=int8", "quantize.cache=false", "offload=layer_stream")
    run_here(tmp_path / "whole", *keys, f"model.weights={weights}", "checkpoint.every=1")
    checkpoint = tmp_path / "whole" / "checkpoints" / "step-00000001"
    with pytest.raises(UserError, match="source=m"):
        run_here(tmp_path / "rest", *keys, f"model.weights={weights}", "offload.source=mapped", f"resume={checkpoint}")


def test_the_note_says_why_weights_are_in_memory(weights: Path):
    parts = components_of(*MAPPED, f"model.weights={weights}", "quantize=int8", "offload.outside=stream")
    note = mapped_note(parts.config, parts.model, parts.footprint)
    assert "are read from files; in memory are units with weights that" in note
    assert "are quantised by this run" in note
