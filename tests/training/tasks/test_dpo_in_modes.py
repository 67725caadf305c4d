"""DPO under every mode, in microbatches and on two devices: losses, rewards and evaluations of `none`, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.helpers.in_process import SMALL_MODEL, run_here
from tests.training.helpers.modes import small_modes
from tests.training.parallel.conftest import run_ranks
from training.runs.files import REFERENCE_FILE

REFERENCES = {
    "cached": (),
    "adapter": ("adapter=lora", "adapter.dropout=0.1"),
    "copy": ("task.reference=copy",),
    "adapter and copy": ("adapter=lora", "adapter.dropout=0.1", "task.reference=copy"),
}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    pairs = tmp_path_factory.mktemp("pairs") / "pairs.jsonl"
    rows = (
        {"prompt": f"Say {n}", "chosen": f"{n} " * (1 + n % 5), "rejected": "no " * (n % 3) + str(n + 1)}
        for n in range(20)
    )
    pairs.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (key for key in SMALL_MODEL if not key.startswith("dataset"))
    given = "task=dpo", "dataset=preferences", f"dataset.files={pairs}", "dataset.eval_share=0.25", "seq_len=48"
    run = "steps=3", "log_every=1", "warmup_steps=1", "eval.every=2", "optimizer.lr=0.01", "tracking=disabled"
    return (*small, *given, *run)


def curve(folder: Path) -> list[dict]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("train/loss", "train/grad_norm", "eval/loss")
    return [
        {key: value for key, value in line.items() if key in keys or "/reward_" in key}
        for line in lines
        if line["train/step"] or "eval/loss" in line
    ]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, overrides: tuple[str, ...]) -> Callable[[str, int], Path]:
    """Returns the folder of the run with a reference in so many microbatches, without offloading."""
    folder, made = tmp_path_factory.mktemp("without"), {}

    def run(reference: str, microbatches: int) -> Path:
        key = folder / f"{reference}{microbatches}"
        if key not in made:
            made[key] = run_here(key, *overrides, *REFERENCES[reference], f"microbatches={microbatches}")
            found = curve(key)
            assert len(found) == 4
            assert found[1]["train/loss"] != found[-1]["train/loss"]
        return key

    return run


# Each reference once, and each way of moving weights; every other case takes as long as these.
QUICK = {
    ("layer_stream", "cached"),
    ("shard_offload", "adapter"),
    ("shard_offload", "copy"),
    ("layer_stream", "adapter and copy"),
}


@pytest.mark.parametrize(
    ("mode", "reference"),
    [
        pytest.param(mode, reference, marks=() if (mode, reference) in QUICK else pytest.mark.slow)
        for mode in small_modes()
        for reference in REFERENCES
    ],
)
def test_modes(mode: str, reference: str, without, overrides, tmp_path: Path) -> None:
    expected = without(reference, 2)
    keys = (*overrides, *REFERENCES[reference], "microbatches=2", f"offload={mode}", *small_modes()[mode])
    run_here(tmp_path, *keys, "optimizer=host_adamw")
    assert curve(tmp_path) == curve(expected)
    if reference == "cached":
        tables = [load_file(folder / REFERENCE_FILE)["reference"] for folder in (tmp_path, expected)]
        assert tables[0].equal(tables[1])


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_shards_side_by_side(microbatches: int, reference: str, without, overrides, tmp_path: Path) -> None:
    mode = "offload=shard_offload", "offload.shards=2", f"microbatches={microbatches}"
    run_here(tmp_path, *overrides, *REFERENCES[reference], *mode)
    assert curve(tmp_path) == curve(without(reference, microbatches))


@pytest.mark.slow
@pytest.mark.parametrize("homes", ["own", "shared"])
@pytest.mark.parametrize("reference", REFERENCES)
def test_two_ranks_compute_what_one_device_does(reference: str, homes: str, overrides, tmp_path: Path) -> None:
    shared = *overrides, *REFERENCES[reference]
    keys = *shared, "devices=2", "microbatches=1", f"parallel.homes={homes}"
    keys += "offload=layer_stream", "optimizer=host_adamw"
    run_ranks(tmp_path / "two", *keys)
    # A rank of the two has half of the threads: with more, products and norms may round otherwise.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        run_here(tmp_path / "one", *shared, "microbatches=2")
    finally:
        torch.set_num_threads(threads)
    found, expected = curve(tmp_path / "two"), curve(tmp_path / "one")
    for record in (*found, *expected):
        # The norm of gradients in host memory is summed in other parts.
        record.pop("train/grad_norm", None)
    assert found == expected
