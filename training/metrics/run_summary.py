"""The statistics that sum up a run."""

import statistics
from array import array
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

from training.metric_names import METRIC_KEYS

FIRST_LOSS = "train/first_loss"
_STATISTICS = {"median": statistics.median, "mean": statistics.fmean}


class RunSummary:
    """Sums up a run, one record after another, without keeping the records.

    Each statistic has the name of its metric. Peaks, and the first and last losses, are over all records. Medians of
    times and rates, and means of transferred GiB, leave out the warm-up, which allocates and compiles: `warmup_steps`
    steps from the first one on, and from `start` on, the step after which the run resumed. If no record begins after
    the warm-up, one that ends after it counts. If a resumed run ends in its warm-up, the records before `start` count,
    chosen in the same way; if there are none, all records. A metric that no record has is left out.
    """

    def __init__(self, warmup_steps: int, start: int = 0):
        self._warmup_steps, self._start = warmup_steps, start
        # The step of the last record of steps, and how far from a warm-up the records in `_values` are: `_distance_of`.
        self._last_step = 0
        self._distance = 0
        self._losses: dict[str, float] = {}
        self._peaks: dict[str, float] = {}
        # An array takes 8 bytes for each number, which a run of any length can afford.
        self._values: defaultdict[str, array[float]] = defaultdict(lambda: array("d"))

    def add(self, record: dict[str, Any]) -> None:
        """Adds the next record, as MetricsWriter writes it."""
        if FIRST_LOSS in record:
            self._losses.setdefault(FIRST_LOSS, record[FIRST_LOSS])
        if "train/loss" in record:
            self._losses.setdefault(FIRST_LOSS, record["train/loss"])
            self._losses["train/final_loss"] = record["train/loss"]
        for score in ("loss", "accuracy"):
            if f"eval/{score}" in record:
                self._losses[f"eval/final_{score}"] = record[f"eval/{score}"]
        distance = self._distance
        # A record of an evaluation alone has none of the times that are to be replaced.
        if "train/loss" in record:
            distance = self._distance_of(record["train/step"])
            self._last_step = record["train/step"]
            if distance > self._distance:
                self._distance = distance
                self._values.clear()
        for key, metric in METRIC_KEYS.items():
            if metric.summary is None or key not in record:
                continue
            if metric.summary == "max":
                self._peaks[key] = max(self._peaks.get(key, record[key]), record[key])
            elif distance == self._distance:
                self._values[key].append(record[key])

    def _distance_of(self, step: int) -> int:
        """Returns how far the record of the steps since the last one, up to `step`, is from a warm-up.

        0: it ends in one; 1 and 3: it ends behind one, of an earlier run and of this one; 2 and 4: all of it is behind
        it. A record has the mean of its steps, without those of the warm-up where others follow (`StepMeter`).
        """
        of_this_run = step > self._start
        start = self._start if of_this_run else 0
        warm_from = start + self._warmup_steps
        if step <= warm_from:
            return 0
        return 1 + (max(self._last_step, start) >= warm_from) + 2 * of_this_run

    @property
    def has_first_loss(self) -> bool:
        """True once a record had the loss of a step."""
        return FIRST_LOSS in self._losses

    def values(self) -> dict[str, float]:
        """Returns the statistics of all records so far."""
        typical = {key: _STATISTICS[METRIC_KEYS[key].summary](values) for key, values in self._values.items()}
        found = self._peaks | typical
        return self._losses | {key: found[key] for key in METRIC_KEYS if key in found}


def summarise(records: Iterable[dict[str, Any]], *, warmup_steps: int, total_steps: int) -> dict[str, Any]:
    """Returns the `RunSummary` of `records`, which are in order, and under `steps` the optimizer steps done."""
    summary = RunSummary(warmup_steps)
    for record in records:
        summary.add(record)
    return {"steps": total_steps} | summary.values()
