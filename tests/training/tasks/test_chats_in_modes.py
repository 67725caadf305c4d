"""Chats under every mode, padded and packed, in microbatches and resumed: losses of `none`, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.helpers.in_process import run_here
from tests.training.helpers.modes import small_modes
from tests.training.parallel.conftest import run_ranks
from tests.training.tasks.small_runs import Without, curve, overrides_for

PACKED = {"padded": "dataset.packed=false", "packed": "dataset.packed=true"}
# The others run with the slow tests: each takes as long as these.
QUICK = {("layer_stream", "packed"), ("shard_offload", "padded"), ("tensor_swap", "packed")}


@pytest.fixture(scope="module")
def overrides(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    rows = ({"prompt": f"Say {n}", "completion": f"{n} " * (1 + n % 7)} for n in range(50))
    return overrides_for(
        tmp_path_factory.mktemp("chats"), rows, "dataset=chat", "seq_len=64", "batch_size=5", "steps=4"
    )


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory, overrides: tuple[str, ...]) -> Without:
    return Without(tmp_path_factory.mktemp("without"), overrides)


@pytest.mark.parametrize(
    ("mode", "rows"),
    [
        pytest.param(mode, rows, marks=() if (mode, rows) in QUICK else pytest.mark.slow)
        for mode in small_modes()
        for rows in PACKED
    ],
)
def test_modes(mode: str, rows: str, without, overrides, tmp_path: Path) -> None:
    keys = PACKED[rows], "microbatches=2"
    run_here(tmp_path, *overrides, *keys, f"offload={mode}", *small_modes()[mode], "optimizer=host_adamw")
    assert curve(tmp_path) == curve(without(*keys))


@pytest.mark.parametrize("rows", PACKED)
def test_the_weighted_mean_over_microbatches_is_that_of_one_batch(rows: str, without) -> None:
    """Microbatches of 3 and 2 rows, with unequal labels, round otherwise, and that is all."""
    whole, parts = (curve(without(PACKED[rows], f"microbatches={count}")) for count in (1, 2))
    for one, several in zip(whole, parts, strict=True):
        assert one == pytest.approx(several, rel=2e-4)
    # It trains.
    assert whole[-1]["train/loss"] < whole[1]["train/loss"]


@pytest.mark.parametrize("rows", PACKED)
def test_a_run_that_resumes_goes_on_as_if_it_had_not_stopped(rows: str, without, overrides, tmp_path: Path) -> None:
    keys = PACKED[rows], "microbatches=2"
    run_here(tmp_path, *overrides, *keys, "steps=2", "checkpoint.every=2")
    run_here(tmp_path, *overrides, *keys, "resume=auto")
    assert curve(tmp_path)[-2:] == curve(without(*keys))[-2:]


@pytest.mark.slow
@pytest.mark.parametrize("rows", PACKED)
def test_two_ranks_compute_what_one_device_does(rows: str, overrides, tmp_path: Path) -> None:
    keys = *overrides, PACKED[rows], "batch_size=6", "microbatches=2"
    run_here(tmp_path / "one", *keys)
    run_ranks(tmp_path / "two", *keys, "microbatches=1", "devices=2", "offload=layer_stream")
    found, expected = curve(tmp_path / "two"), curve(tmp_path / "one")
    for record in (*found, *expected):
        # A rank has fewer threads, with which a norm may round otherwise; the gradients are the same.
        record.pop("train/grad_norm", None)
    assert found == expected
