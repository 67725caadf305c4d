"""Rows of a comparison: runs that differ in their seed alone, averaged and compared with their resident run."""

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.comparison.departures import departure, relative_difference
from training.comparison.runs import LONGEST_WORD, Run
from training.comparison.settings import all_settings, find_reference, name_runs
from training.metrics.files import is_number
from training.metrics.names import METRIC_KEYS, SUMMARY_KEYS
from training.visible_text import shortened

EQUAL = "equal"
REFERENCE = "reference"


@dataclass(frozen=True)
class Statistic:
    """Mean over the seeds of a row and their standard deviation.

    Runs that repeat a seed count as one, which is their mean. The spread is None for a single seed, and where a value
    is not finite.
    """

    mean: float
    spread: float | None = None


@dataclass(eq=False)
class Row:
    """Runs that differ in their seed alone. A value that was not measured is None or missing."""

    name: str
    runs: list[Run]
    statistics: dict[str, Statistic]
    """by the names of `training.metrics.names`"""
    reference: "Row | None" = field(default=None, repr=False)
    """the resident row that this one is compared with; a resident row is its own reference"""
    ratio: float | None = None
    """step time divided by that of the reference"""
    floor_ratio: float | None = None
    """step time divided by `perf/floor_ms`, which the run or the plan states; None on the CPU"""
    curve: str | None = None
    """EQUAL if the losses are those of the reference in every bit, else the largest relative difference; of the
    reference REFERENCE"""
    departure: str | None = None
    """where and why the losses differ from those of the reference, of the first run that differs"""

    @property
    def measured(self) -> list[Run]:
        """The runs that the row averages: those that finished, or all runs if none finished."""
        return [run for run in self.runs if run.finished] or self.runs

    @property
    def finished(self) -> bool:
        return any(run.finished for run in self.runs)

    @property
    def planned(self) -> bool:
        return all(run.planned for run in self.measured)

    @property
    def fits(self) -> bool:
        return all(run.fits for run in self.measured)

    @property
    def forward_only(self) -> bool:
        """True for steps without backward and update, whose times are not compared with those of full steps."""
        return any(run.forward_only for run in self.measured)

    @property
    def misfits(self) -> str:
        """The memory that planned runs do not fit in: device, host, or both."""
        return " and ".join(dict.fromkeys(kind for run in self.measured for kind in run.misfits))

    @property
    def seeds(self) -> str:
        counts = Counter(shortened(run.seed, LONGEST_WORD) for run in self.runs if run.seed is not None)
        return ", ".join(seed if count == 1 else f"{seed} ({count} runs)" for seed, count in counts.items())

    @property
    def status(self) -> str:
        """The status that all runs share, or else the number of runs with each status."""
        words = [run.status for run in self.runs]
        if len(set(words)) == 1:
            return words[0]
        return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))

    @property
    def reasons(self) -> list[str]:
        """The reasons why runs ended as they did, each reason once."""
        return list(dict.fromkeys(run.reason for run in self.runs if run.reason not in ("", run.status)))

    @property
    def notes(self) -> list[str]:
        """The notes on runs that differed from what was asked for, each once."""
        return list(dict.fromkeys(note for run in self.runs for note in run.notes))

    def mean(self, key: str) -> float | None:
        statistic = self.statistics.get(key)
        return statistic.mean if statistic else None


def build_rows(runs: Sequence[Run]) -> list[Row]:
    """Groups `runs` into rows, in the order of the rows' first runs, and compares each row with its reference."""
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run, values in zip(runs, all_settings(runs), strict=True):
        # A run without a configuration repeats no other run as far as is known.
        members = next((members for other, members in groups if other == values and run.config), None)
        if members is None:
            groups.append((values, [run]))
        else:
            members.append(run)
    names = name_runs([members[0] for _, members in groups], [values for values, _ in groups])
    rows = [Row(name, members, {}) for name, (_, members) in zip(names, groups, strict=True)]
    for row in rows:
        row.statistics = _statistics(row.measured)
    _count_devices(rows)
    candidates = [values for values, _ in groups]
    for row, values in zip(rows, candidates, strict=True):
        found = find_reference(values, [other if rows[i].finished else {} for i, other in enumerate(candidates)])
        if found is not None:
            _compare(row, rows[found])
        row.floor_ratio = _floor_ratio(row)
    return rows


def curve_difference(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float | None:
    """Returns the largest relative difference of the losses, of training and of evaluation, at steps that both logged.

    The result is 0 if all are equal in every bit, where NaN equals NaN; infinity if only one of two losses is finite;
    None if there is no step that both logged.
    """
    pairs = []
    for key in ("train/loss", "eval/loss"):
        expected = dict(losses(reference, key))
        pairs += [(loss, expected[step]) for step, loss in losses(records, key) if step in expected]
    return max((relative_difference(loss, other) for loss, other in pairs), default=None)


def split_by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Returns one list for each seed, with its runs, which repeat each other."""
    groups: dict[str | None, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.seed, []).append(run)
    return list(groups.values())


def mean(values: Sequence[float]) -> float:
    """Returns the mean; unlike those of the module `statistics` it takes infinite values."""
    return sum(values) / len(values)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Returns the indices of the points that no other point beats, in the order of the first coordinate.

    One point beats another if it is at most as large in both coordinates and smaller in one.
    """
    front: list[int] = []
    lowest = math.inf
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if points[index][1] < lowest or (front and points[index] == points[front[-1]]):
            front.append(index)
            lowest = points[index][1]
    return front


def _statistics(runs: Sequence[Run]) -> dict[str, Statistic]:
    keys = dict.fromkeys(key for run in runs for key in run.summary if key in METRIC_KEYS | SUMMARY_KEYS)
    found = {}
    for key in keys:
        by_seed = [[run.summary[key] for run in repeated if key in run.summary] for repeated in split_by_seed(runs)]
        if all(is_number(value) for values in by_seed for value in values):
            means = [mean(values) for values in by_seed if values]
            has_spread = len(means) > 1 and all(map(math.isfinite, means))
            found[key] = Statistic(mean(means), statistics.stdev(means) if has_spread else None)
    return found


def _count_devices(rows: Sequence[Row]) -> None:
    """Gives all rows the number of their devices, if one has several; a plan has it in its configuration alone."""
    counts = [max((_devices(run) for run in row.measured), default=0) for row in rows]
    if max(counts, default=0) > 1:
        for row, count in zip(rows, counts, strict=True):
            if count:
                row.statistics["devices"] = Statistic(float(count))


def _devices(run: Run) -> int:
    """Returns the devices that shared each step of a run, 0 if that is not known."""
    count = run.summary.get("devices")
    if is_number(count):
        return int(count)
    # A run of an earlier version has no such key, and one device.
    text = str(run.config.get("devices", 1))
    return int(text) if run.config and re.fullmatch(r"\d{1,6}", text) else 0


def _compare(row: Row, reference: Row) -> None:
    row.reference = reference
    own, other = row.mean("perf/step_ms"), reference.mean("perf/step_ms")
    if own is not None and other and row.forward_only == reference.forward_only:
        row.ratio = own / other
    if row is reference:
        row.curve = REFERENCE
        return
    by_seed = {run.seed: run for run in reversed(reference.measured)}
    pairs = [(run, by_seed[run.seed]) for run in row.measured if run.seed in by_seed]
    differences = [curve_difference(run.records, other.records) for run, other in pairs]
    known = [difference for difference in differences if difference is not None]
    if known:
        row.curve = EQUAL if max(known) == 0 else f"{max(known):.1e}"
    row.departure = next(filter(None, (departure(run.records, other.records) for run, other in pairs)), None)


def _floor_ratio(row: Row) -> float | None:
    own, floor_ms = row.mean("perf/step_ms"), row.mean("perf/floor_ms")
    return own / floor_ms if own is not None and floor_ms else None


def losses(records: Sequence[dict[str, Any]], key: str = "train/loss") -> list[tuple[int, float]]:
    """Returns step and loss of the logged steps that have a loss under `key`."""
    complete = (record for record in records if {"train/step", key} <= record.keys())
    return [(record["train/step"], record[key]) for record in complete]
