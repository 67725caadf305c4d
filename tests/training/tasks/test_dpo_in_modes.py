"""DPO under every mode, in microbatches and on two devices: losses, rewards and evaluations of `none`, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.training.helpers.in_process import run_here
from tests.training.helpers.modes import small_modes
from tests.training.parallel.conftest import run_ranks
from tests.training.tasks.small_runs import Without, curve, overrides_for
from training.runs.files import REFERENCE_FILE

REFERENCES = {
    "cached": (),
    "adapter": ("adapter=lora", "adapter.dropout=0.1"),
    "copy": ("task.reference=copy",),
    "adapter and copy": ("adapter=lora", "adapter.dropout=0.1", "task.reference=copy"),
}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    rows = (
        {"prompt": f"Say {n}", "chosen": f"{n} " * (1 + n % 5), "rejected": "no " * (n % 3) + str(n + 1)}
        for n in range(20)
    )
    folder = tmp_path_factory.mktemp("pairs")
    return overrides_for(folder, rows, "task=dpo", "dataset=preferences", "seq_len=48", "steps=3")


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, overrides: tuple[str, ...]) -> Without:
    return Without(tmp_path_factory.mktemp("without"), overrides)


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
    keys = *REFERENCES[reference], "microbatches=2"
    expected = without(*keys)
    run_here(tmp_path, *overrides, *keys, f"offload={mode}", *small_modes()[mode], "optimizer=host_adamw")
    assert curve(tmp_path) == curve(expected)
    if reference == "cached":
        tables = [load_file(folder / REFERENCE_FILE)["reference"] for folder in (tmp_path, expected)]
        assert tables[0].equal(tables[1])


@pytest.mark.slow
@pytest.mark.parametrize("reference", REFERENCES)
@pytest.mark.parametrize("microbatches", [1, 4])
def test_shards_side_by_side(microbatches: int, reference: str, without, overrides, tmp_path: Path) -> None:
    keys = *REFERENCES[reference], f"microbatches={microbatches}"
    run_here(tmp_path, *overrides, *keys, "offload=shard_offload", "offload.shards=2")
    assert curve(tmp_path) == curve(without(*keys))


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
