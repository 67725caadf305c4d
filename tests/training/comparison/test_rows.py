"""Rows: averages over seeds, ratios to the resident run and the floor, losses, and the Pareto front."""

from __future__ import annotations

import math

import pytest

from training.comparison.rows import Row, Statistic, pareto_front
from training.comparison.table import MISSING, cells

H200 = {"gpu_name": "NVIDIA H200", "h2d_gb_s": 50.0, "d2h_gb_s": 25.0}


def rows(write_run) -> dict[str, Row]:
    return {row.name: row for row in write_run.rows()}


@pytest.mark.parametrize(
    ("times", "expected", "seeds"),
    [
        ([(0, 90.0), (1, 100.0), (2, 110.0)], Statistic(100.0, 10.0), "0, 1, 2"),
        # Runs that repeat a seed count as one.
        ([(0, 90.0), (0, 92.0), (0, 88.0), (1, 110.0)], Statistic(100.0, pytest.approx(200**0.5)), "0 (3 runs), 1"),
        ([(3, 90.0), (3, 110.0)], Statistic(100.0, None), "3 (2 runs)"),
        ([(0, 90.0)], Statistic(90.0, None), "0"),
    ],
)
def test_seeds_are_averaged_and_their_spread_is_the_standard_deviation(write_run, times, expected: Statistic, seeds):
    for seed, step_ms in times:
        write_run(seed=seed, step_ms=step_ms)
    (row,) = rows(write_run).values()
    assert (row.statistics["perf/step_ms"], row.seeds, row.status) == (expected, seeds, "ok")


def test_a_seed_that_diverged_leaves_the_row_without_a_spread(write_run):
    for seed, loss in enumerate((2.0, math.inf, -math.inf)):
        write_run(seed=seed, losses=(4.0, loss))
    (row,) = rows(write_run).values()
    assert math.isnan(row.mean("train/final_loss"))
    assert row.statistics["train/final_loss"].spread is None


def test_beside_rows_of_several_devices_others_have_one(write_run):
    write_run()
    write_run(top={"devices": 2}, devices=2)
    write_run(top={"devices": 4}, status="planned", losses=None)
    # Of another program, which does not tell.
    (write_run() / "config.yaml").unlink()
    rows = write_run.rows()
    assert [row.devices for row in rows] == [1, 2, 4, None]
    assert [row["devices"] for row in cells(rows)] == ["1", "2", "4", MISSING]
    assert "devices" not in cells([rows[0], rows[3]])[0]


def test_failed_seeds_are_counted_but_not_averaged(write_run):
    write_run(seed=0, step_ms=100.0)
    write_run(seed=1, step_ms=900.0, status="failed", reason="the disk is full")
    (row,) = rows(write_run).values()
    assert (row.mean("perf/step_ms"), row.status, row.reasons) == (100.0, "1 ok, 1 failed", ["the disk is full"])


def test_the_floor_is_the_one_that_the_run_states(write_run):
    write_run("none", step_ms=100.0, hardware=H200)
    write_run("layer_stream", step_ms=300.0, perf__floor_ms=200.0, transfer__h2d_gib=1e6, hardware=H200)
    found = rows(write_run)
    assert (found["none"].floor_ratio, found["layer_stream"].floor_ratio) == (None, 1.5)


def test_a_forward_alone_has_no_ratio_to_a_full_step(write_run):
    write_run("none", step_ms=300.0)
    write_run("layer_stream", step_ms=200.0, forward_only=True)
    write_run("shard_offload", step_ms=600.0)
    assert [row.ratio for row in rows(write_run).values()] == [1.0, None, 2.0]


def test_curves_are_compared_seed_by_seed(write_run):
    write_run("none", seed=0, losses=(4.0, 3.0))
    write_run("none", seed=1, losses=(5.0, 4.0))
    write_run("layer_stream", seed=1, losses=(5.0, 4.0))
    write_run("layer_stream", seed=0, losses=(4.0, 3.0))
    write_run("tensor_swap", seed=0, losses=(4.0, 3.0))
    write_run("tensor_swap", seed=1, losses=(5.0, math.nextafter(4.0, 5.0)))
    found = rows(write_run)
    assert (found["none"].curve, found["layer_stream"].curve) == ("reference", "equal")
    assert found["tensor_swap"].curve == "2.2e-16"


def test_curves_of_other_seeds_are_not_comparable(write_run):
    write_run("none", seed=0)
    write_run("layer_stream", seed=7)
    assert rows(write_run)["layer_stream"].curve is None


@pytest.mark.parametrize(
    ("points", "front"),
    [
        ([(1.0, 1.0)], [0]),
        ([(3.0, 1.0), (1.0, 3.0), (2.0, 2.0)], [1, 2, 0]),
        ([(1.0, 3.0), (2.0, 3.0), (2.0, 1.0), (3.0, 2.0)], [0, 2]),
        ([(1.0, 2.0), (1.0, 1.0)], [1]),
        ([(1.0, 1.0), (1.0, 1.0)], [0, 1]),
    ],
)
def test_the_pareto_front(points: list[tuple[float, float]], front: list[int]):
    assert pareto_front(points) == front
