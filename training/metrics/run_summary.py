"""The figures that sum up a run."""

import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from training.metrics.names import METRIC_KEYS

_STATISTICS = {"median": statistics.median, "mean": statistics.fmean}


class RunFigures:
    """The figures that stand for a run, under the names of the metrics they sum up, without its records.

    Medians of times and rates, means of transferred GiB: over the logged records with `train/step` >
    `warmup_steps`, or over all where there is none. Peaks of memory and the losses: over all records. A
    metric that no record has is left out; without records there are none.

    Args:
        warmup_steps: first steps whose times do not count: they allocate, compile, record the access order.
    """

    def __init__(self, warmup_steps: int):
        self._warmup_steps = warmup_steps
        self._warm = False
        self._losses: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        # Of a number 8 bytes, in a run of any length.
        self._values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))

    def add(self, record: dict[str, Any]) -> None:
        """Takes in the next record, as MetricsWriter writes it."""
        if "train/loss" in record:
            self._losses.setdefault("train/first_loss", record["train/loss"])
            self._losses["train/final_loss"] = record["train/loss"]
        if not self._warm and record["train/step"] > self._warmup_steps:
            self._warm = True
            self._values.clear()
        for key, metric in METRIC_KEYS.items():
            if metric.summary is None or key not in record:
                continue
            if metric.summary == "max":
                self._peaks[key] = max(self._peaks.get(key, record[key]), record[key])
            else:
                self._values[key].append(record[key])

    def summary(self) -> dict[str, float]:
        """The figures of all records so far."""
        typical = {key: _STATISTICS[METRIC_KEYS[key].summary](values) for key, values in self._values.items()}
        figures = self._peaks | typical
        return self._losses | {key: figures[key] for key in METRIC_KEYS if key in figures}


def summarise(records: Iterable[dict[str, Any]], *, warmup_steps: int, total_steps: int) -> dict[str, Any]:
    """The `RunFigures` of `records`, which are in order, and under `steps` the optimizer steps done."""
    figures = RunFigures(warmup_steps)
    for record in records:
        figures.add(record)
    return {"steps": total_steps} | figures.summary()
