"""Chats under every mode, padded and packed, in microbatches and resumed: losses of `none`, bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.training.helpers.in_process import SMALL_MODEL, run_here
from tests.training.helpers.modes import small_modes
from tests.training.parallel.conftest import run_ranks

PACKED = {"padded": False, "packed": True}
# The others run with the slow tests: each takes as long as these.
QUICK = {("layer_stream", "packed"), ("shard_offload", "padded"), ("tensor_swap", "packed")}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    chats = tmp_path_factory.mktemp("chats") / "chats.jsonl"
    rows = ({"prompt": f"Say {n}", "completion": f"{n} " * (1 + n % 7)} for n in range(50))
    chats.write_text("".join(json.dumps(row) + "\n" for row in rows))
    small = (key for key in SMALL_MODEL if not key.startswith("dataset"))
    given = "dataset=chat", f"dataset.files={chats}", "dataset.eval_share=0.25", "seq_len=64", "batch_size=5"
    run = "steps=4", "log_every=1", "warmup_steps=1", "eval.every=2", "optimizer.lr=0.01", "tracking=disabled"
    return (*small, *given, *run)


def curve(folder: Path) -> list[dict[str, float]]:
    lines = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    keys = ("train/step", "train/loss", "train/grad_norm", "eval/loss")
    return [{key: value for key, value in line.items() if key in keys} for line in lines]


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, overrides: tuple[str, ...]) -> Callable[..., list[dict]]:
    """Returns the curve of a run without offloading, of padded or packed rows in so many microbatches."""
    folder, made = tmp_path_factory.mktemp("without"), {}

    def run(rows: str, microbatches: int = 2) -> list[dict]:
        key = folder / f"{rows}{microbatches}"
        if key not in made:
            run_here(key, *overrides, f"dataset.packed={PACKED[rows]}", f"microbatches={microbatches}")
            made[key] = curve(key)
            losses = [line["train/loss"] for line in made[key] if line["train/step"]]
            assert len(losses) == 4
            assert losses[-1] < losses[0]
        return made[key]

    return run


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        pytest.param(mode, rows, marks=() if (mode, rows) in QUICK else pytest.mark.slow)
        for mode in small_modes()
        for rows in PACKED
    ],
)
def test_modes(mode: str, rows: str, without, overrides, tmp_path: Path) -> None:
    keys = (*overrides, f"dataset.packed={PACKED[rows]}", "microbatches=2", f"offload={mode}", *small_modes()[mode])
    run_here(tmp_path, *keys, "optimizer=host_adamw")
    assert curve(tmp_path) == without(rows)


@pytest.mark.parametrize("rows", PACKED)
def test_the_weighted_mean_over_microbatches_is_that_of_one_batch(rows: str, without) -> None:
    """Microbatches of 3 and 2 rows, with unequal labels, round otherwise, and that is all."""
    for one, several in zip(without(rows, 1), without(rows, 2), strict=True):
        assert one == pytest.approx(several, rel=2e-4)


@pytest.mark.parametrize("rows", PACKED)
def test_a_run_that_resumes_goes_on_as_if_it_had_not_stopped(rows: str, without, overrides, tmp_path: Path) -> None:
    keys = *overrides, f"dataset.packed={PACKED[rows]}", "microbatches=2"
    run_here(tmp_path, *keys, "steps=2", "checkpoint.every=2")
    run_here(tmp_path, *keys, "resume=auto")
    assert curve(tmp_path)[-2:] == without(rows)[-2:]


@pytest.mark.slow
@pytest.mark.parametrize("rows", PACKED)
def test_two_ranks_compute_what_one_device_does(rows: str, without, overrides, tmp_path: Path) -> None:
    keys = *overrides, f"dataset.packed={PACKED[rows]}", "batch_size=6", "microbatches=2"
    run_here(tmp_path / "one", *keys)
    run_ranks(tmp_path / "two", *keys, "microbatches=1", "devices=2", "offload=layer_stream")
    found, expected = curve(tmp_path / "two"), curve(tmp_path / "one")
    for record in (*found, *expected):
        # A rank has fewer threads, with which a norm may round otherwise; the gradients are the same.
        record.pop("train/grad_norm", None)
    assert found == expected
