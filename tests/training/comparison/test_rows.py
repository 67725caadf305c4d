"""Rows: averages over seeds, ratios to the resident run and the floor, losses, and the Pareto front."""

import json
import math

import pytest

from training.comparison.rows import Row, Statistic, departure, largest_difference, pareto_front
from training.comparison.table import MISSING, cells

H200 = {"gpu_name": "NVIDIA H200", "h2d_gb_s": 50.0, "d2h_gb_s": 25.0}


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
    (row,) = write_run.by_name().values()
    assert (row.statistics["perf/step_ms"], row.seeds, row.status) == (expected, seeds, "ok")


def test_a_seed_that_diverged_leaves_the_row_without_a_spread(write_run):
    for seed, loss in enumerate((2.0, math.inf, -math.inf)):
        write_run(seed=seed, losses=(4.0, loss))
    (row,) = write_run.by_name().values()
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
    (row,) = write_run.by_name().values()
    assert (row.mean("perf/step_ms"), row.status, row.reasons) == (100.0, "1 ok, 1 failed", ["the disk is full"])


def test_a_stopped_seed_counts_only_where_none_came_to_its_end(write_run):
    write_run(seed=0, losses=(4.0, 3.0, 2.0))
    stopped = write_run(seed=1, losses=(4.0,))
    summary = json.loads((stopped / "summary.json").read_text())
    (stopped / "summary.json").write_text(json.dumps(summary | {"status": "stopped"}))
    (row,) = write_run.by_name().values()
    assert (row.mean("train/final_loss"), row.status) == (2.0, "1 ok, 1 stopped")
    assert Row("alone", [run for run in row.runs if run.status == "stopped"]).measured


def test_times_of_different_hosts_and_versions_are_marked(write_run):
    write_run("none", hardware={"cpu_name": "A", "cpu_cores": 4, "torch": "2.13.0", "commit": "1"})
    write_run("layer_stream", hardware={"cpu_name": "A", "cpu_cores": 2, "torch": "2.12.0", "commit": "1"})
    write_run("tensor_swap", hardware={"cpu_name": "A", "cpu_cores": 4, "torch": "2.13.0", "commit": "1"})
    notes = {name: row.notes for name, row in write_run.by_name().items()}
    mark = "compared across machines or versions: host 2 x A, 4 x A; torch 2.12.0, 2.13.0"
    assert notes == {"none": [], "layer_stream": [mark], "tensor_swap": []}


def test_the_floor_is_the_one_that_the_run_states(write_run):
    write_run("none", step_ms=100.0, hardware=H200)
    write_run("layer_stream", step_ms=300.0, perf__floor_ms=200.0, transfer__h2d_gib=1e6, hardware=H200)
    found = write_run.by_name()
    assert (found["none"].floor_ratio, found["layer_stream"].floor_ratio) == (None, 1.5)


def test_a_forward_alone_has_no_ratio_to_a_full_step(write_run):
    write_run("none", step_ms=300.0)
    write_run("layer_stream", step_ms=200.0, forward_only=True)
    write_run("shard_offload", step_ms=600.0)
    assert [row.ratio for row in write_run.by_name().values()] == [1.0, None, 2.0]


def test_curves_are_compared_seed_by_seed(write_run):
    write_run("none", seed=0, losses=(4.0, 3.0))
    write_run("none", seed=1, losses=(5.0, 4.0))
    write_run("layer_stream", seed=1, losses=(5.0, 4.0))
    write_run("layer_stream", seed=0, losses=(4.0, 3.0))
    write_run("tensor_swap", seed=0, losses=(4.0, 3.0))
    write_run("tensor_swap", seed=1, losses=(5.0, math.nextafter(4.0, 5.0)))
    found = write_run.by_name()
    assert (found["none"].curve, found["layer_stream"].curve) == ("reference", "equal")
    assert found["tensor_swap"].curve == "2.2e-16"


def test_curves_of_other_seeds_are_not_comparable(write_run):
    write_run("none", seed=0)
    write_run("layer_stream", seed=7)
    assert write_run.by_name()["layer_stream"].curve is None


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


NAN = math.nan


def records(*steps: tuple[float, float | None]) -> list[dict]:
    return [
        {"train/step": number, "train/loss": loss, **({} if norm is None else {"train/grad_norm": norm})}
        for number, (loss, norm) in enumerate(steps, start=1)
    ]


REFERENCE = records((4.0, 1.0), (3.0, 0.9), (2.0, 0.8))


@pytest.mark.parametrize(
    ("own", "why"),
    [
        (records((4.0, 1.0), (3.0, 0.9), (2.0, 0.8)), None),
        (records((4.0, 2.0), (3.0, 0.9), (2.0, 0.8)), None),
        (records((4.0, 0.0), (3.9, 0.0)), "from step 2: the gradients of step 1 are zero"),
        (records((4.0, NAN), (NAN, NAN)), "from step 2: the gradient norm of step 1 is nan"),
        (records((4.0, None), (NAN, None)), "from step 2: it is nan"),
        (records((4.0, 14132.0), (3.5, 2.0)), "from step 2: the gradient norm of step 1 is 1.413e+04, not 1"),
        (records((4.0, 1.001), (3.001, 0.9)), "from step 2: gradients differ by rounding (3.3e-04 in the loss)"),
        (records((4.0, 1.0), (3.5, 0.9)), "from step 2: gradient norms before were equal, the update differs"),
        (records((4.0, None), (3.5, None)), "from step 2: gradient norms before were not recorded, the update"),
        (records((4.004, 1.0)), "from step 1: the forward with the same weights differs by 1.0e-03, another precision"),
        (records((5.0, 1.0)), "from step 1: the forward with the same weights differs by 2.0e-01, another loss"),
    ],
)
def test_the_cause_is_the_earliest_that_was_measured(own: list[dict], why: str | None):
    found = departure(own, REFERENCE)
    assert found is None if why is None else found.startswith(f"the loss differs {why}"), found


def test_equal_losses_that_are_nan_are_no_departure():
    both = records((4.0, 1.0), (NAN, NAN))
    assert departure(both, both) is None


def test_steps_that_only_one_logged_tell_nothing():
    assert departure(REFERENCE, []) is None
    assert departure([{"eval/loss": 1.0, "train/step": 1}], REFERENCE) is None


@pytest.mark.parametrize(
    ("own", "other", "expected"),
    [
        ({1: 4.0, 2: 3.0}, {1: 4.0, 2: 3.0}, 0.0),
        ({2: 3.0, 4: 9.0}, {1: 8.0, 2: 3.0}, 0.0),
        ({1: 4.0}, {2: 4.0}, None),
        ({1: 3.0}, {1: 4.0}, 0.25),
        ({1: NAN, 2: math.inf}, {1: NAN, 2: math.inf}, 0.0),
        ({1: NAN}, {1: 4.0}, math.inf),
    ],
)
@pytest.mark.parametrize("key", ["train/loss", "eval/loss"])
def test_the_largest_difference_of_losses(own: dict, other: dict, expected: float | None, key: str):
    logged = [[{"train/step": step, key: loss} for step, loss in curve.items()] for curve in (own, other)]
    assert largest_difference(*logged) == expected
