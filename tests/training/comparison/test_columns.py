"""The columns: how values and their spread are written for people."""

from __future__ import annotations

import pytest

from training.comparison.columns import COLUMNS, MISSING, curve_text
from training.metrics.names import METRIC_KEYS, SUMMARY_KEYS


def text(row, title: str) -> str:
    return next(column for column in COLUMNS if column.title == title).text(row)


def test_titles_and_names_are_distinct():
    assert len({column.title for column in COLUMNS}) == len({column.name for column in COLUMNS}) == len(COLUMNS)


def test_every_column_has_a_value_where_everything_was_measured(write_run):
    keys = [key for key in (*METRIC_KEYS, *SUMMARY_KEYS) if "/" in key and not key.startswith("train/")]
    metrics = {key.replace("/", "__"): 1.0 for key in keys} | {"devices": 2, "checkpoint__best_step": 3}
    metrics.pop("perf__step_ms")
    write_run(**metrics)
    (row,) = write_run.rows()
    assert [column.title for column in COLUMNS if column.text(row) == MISSING] == []


def test_what_was_not_measured_is_a_dash(write_run):
    write_run(losses=None, step_ms=None)
    (row,) = write_run.rows()
    assert {column.text(row) for column in COLUMNS} == {MISSING}
    assert curve_text(row) == "reference"


@pytest.mark.parametrize(
    ("loss", "expected"), [(9999.5, "9999.5000"), (12345.678, "12346"), (-1e300, "-1e+300"), (float("inf"), "inf")]
)
def test_a_large_loss_is_written_with_its_exponent(write_run, loss: float, expected: str):
    write_run(losses=(4.0, loss))
    (row,) = write_run.rows()
    assert text(row, "final loss") == expected


def test_a_spread_that_rounds_to_zero_is_left_out(write_run):
    write_run(seed=0, step_ms=100.0)
    write_run(seed=1, step_ms=100.01)
    (row,) = write_run.rows()
    assert text(row, "step ms") == "100.0"


def test_ratios_have_no_spread(write_run):
    for seed, step_ms in ((0, 90.0), (1, 110.0)):
        write_run(seed=seed, step_ms=step_ms)
    (row,) = write_run.rows()
    assert (text(row, "step ms"), text(row, "to none")) == ("100.0 ± 14.1", "1.00")
