"""Rows of a comparison: runs that differ in their seed alone, averaged and compared with their resident run.

A row says how far its losses are from those of the resident run, from which step on, and why.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from training.comparison.runs import LONGEST_WORD, PLACE, Run
from training.comparison.settings import all_settings, find_reference, is_resident, name_runs
from training.metric_names import METRIC_KEYS, SUMMARY_KEYS
from training.runs.records import is_number
from training.visible_text import shortened

EQUAL = "equal"
REFERENCE = "reference"
LOSS, EVAL_LOSS, NORM = "train/loss", "eval/loss", "train/grad_norm"
# The largest relative difference that a lower precision, or another order of sums, explains.
ROUNDING = 0.02


@dataclass(frozen=True)
class Statistic:
    """The mean over a row's seeds, and their standard deviation `spread` (None for a single seed).

    Runs with the same seed count as one: their mean.
    """

    mean: float
    spread: float | None = None


@dataclass(eq=False)
class Row:
    """Runs that differ in their seed alone. A value that was not measured is None or missing."""

    name: str
    runs: list[Run]
    statistics: dict[str, Statistic] = field(default_factory=dict)
    """by the names of `training.metric_names`"""
    reference: Row | None = field(default=None, repr=False)
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
        """The runs that the row averages: those that came to their end, else those that finished, else all runs."""
        finished = [run for run in self.runs if run.finished]
        return [run for run in finished if run.status != "stopped"] or finished or self.runs

    @property
    def finished(self) -> bool:
        return any(run.finished for run in self.runs)

    @property
    def planned(self) -> bool:
        return all(run.planned for run in self.measured)

    @property
    def devices(self) -> int | None:
        """The devices that shared each step; a plan has them in its configuration alone."""
        known = [run.summary.get("devices") or run.config.get("devices", 1) for run in self.measured if run.config]
        counts = [int(count) for count in map(str, known) if re.fullmatch(r"\d{1,6}", count)]
        return max(counts, default=None)

    @property
    def forward_only(self) -> bool:
        """True for steps without backward and update, whose times are not compared with those of full steps."""
        return any(run.forward_only for run in self.measured)

    @property
    def misfits(self) -> str:
        """The memory that planned runs do not fit in: device, host, or both; empty if they fit."""
        return " and ".join(dict.fromkeys(kind for run in self.measured for kind in run.misfits))

    @property
    def seeds(self) -> str:
        counts = Counter(shortened(run.seed, LONGEST_WORD) for run in self.runs if run.seed is not None)
        return ", ".join(seed if count == 1 else f"{seed} ({count} runs)" for seed, count in counts.items())

    @property
    def status(self) -> str:
        """The status that all runs share, or else the number of runs with each status."""
        counts = Counter(run.status for run in self.runs)
        return ", ".join(word if len(counts) == 1 else f"{count} {word}" for word, count in counts.items())

    @property
    def reasons(self) -> list[str]:
        """The reasons why runs ended as they did, each once."""
        return list(dict.fromkeys(run.reason for run in self.runs if run.reason not in ("", run.status)))

    @property
    def notes(self) -> list[str]:
        """The notes on runs that differed from what was asked for or are compared across machines, each once."""
        compared = [*self.measured, *(self.reference.measured if self.reference else [])]
        places = {key: sorted({run.origin[key] for run in compared if key in run.origin}) for key in PLACE}
        several = [f"{key} {', '.join(values)}" for key, values in places.items() if len(values) > 1]
        mixed = [f"compared across machines or versions: {'; '.join(several)}"] if several else []
        return [*dict.fromkeys(note for run in self.runs for note in run.notes), *mixed]

    def mean(self, key: str) -> float | None:
        statistic = self.statistics.get(key)
        return statistic.mean if statistic else None


def build_rows(runs: Sequence[Run]) -> list[Row]:
    """Groups `runs` into rows, the resident ones first, and compares each row with its reference."""
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run, values in zip(runs, all_settings(runs), strict=True):
        # A run without a configuration repeats no other run as far as is known.
        members = next((members for other, members in groups if other == values and run.config), None)
        if members is None:
            groups.append((values, [run]))
        else:
            members.append(run)
    groups.sort(key=lambda group: not is_resident(group[0]))
    settings = [values for values, _ in groups]
    names = name_runs([members[0] for _, members in groups], settings)
    rows = [Row(name, members) for name, (_, members) in zip(names, groups, strict=True)]
    for row in rows:
        row.statistics = _statistics(row.measured)
    candidates = [values if row.finished else {} for row, values in zip(rows, settings, strict=True)]
    for row, values in zip(rows, settings, strict=True):
        found = find_reference(values, candidates)
        if found is not None:
            _compare(row, rows[found])
        own, floor_ms = row.mean("perf/step_ms"), row.mean("perf/floor_ms")
        row.floor_ratio = own / floor_ms if own is not None and floor_ms else None
    return rows


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
    """Returns the indices of the points on the Pareto front, where smaller is better in both coordinates.

    No other point is at most as large in both coordinates and smaller in one.
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


def _compare(row: Row, reference: Row) -> None:
    row.reference = reference
    own, other = row.mean("perf/step_ms"), reference.mean("perf/step_ms")
    if own is not None and other and row.forward_only == reference.forward_only:
        row.ratio = own / other
    if row is reference:
        row.curve = REFERENCE
        return
    by_seed = {run.seed: run for run in reversed(reference.measured)}
    pairs = [(run.records, by_seed[run.seed].records) for run in row.measured if run.seed in by_seed]
    known = [difference for pair in pairs if (difference := largest_difference(*pair)) is not None]
    if known:
        row.curve = EQUAL if max(known) == 0 else f"{max(known):.1e}"
    row.departure = next(filter(None, (departure(*pair) for pair in pairs)), None)


def losses(records: Sequence[dict[str, Any]], key: str = LOSS) -> dict[int, float]:
    """Returns the values of the metric `key` by step."""
    return {record["train/step"]: record[key] for record in records if {"train/step", key} <= record.keys()}


def largest_difference(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float | None:
    """Returns the largest relative difference between the losses of two runs; None if they have no step in common.

    0 are equal losses; infinity is a loss that is not finite in one run alone.
    """
    differences = []
    for key in (LOSS, EVAL_LOSS):
        own, other = losses(records, key), losses(reference, key)
        differences += [relative_difference(own[step], other[step]) for step in own.keys() & other.keys()]
    return max(differences, default=None)


def departure(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> str | None:
    """Returns one line: the first step at which the training losses differ, and the likely cause; None if equal."""
    own, other = losses(records), losses(reference)
    step = next((step for step in own if step in other and relative_difference(own[step], other[step])), None)
    if step is None:
        return None
    return f"the loss differs from step {step}: {_cause(step, records, reference)}"


def _cause(step: int, records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> str:
    """Returns why the losses differ from `step` on: judged by the gradients before `step`, then by its loss."""
    own, other = losses(records), losses(reference)
    loss, by = own[step], relative_difference(own[step], other[step])
    first = not any(earlier < step for earlier in own.keys() & other.keys())
    norms, other_norms = losses(records, NORM), losses(reference, NORM)
    # Only steps before `step`: its own gradients come from weights that differ already, except in the first step.
    common = [at for at in norms if at in other_norms and (at < step or (first and at == step))]
    for at in common:
        norm, expected = norms[at], other_norms[at]
        if not math.isfinite(norm) and math.isfinite(expected):
            return f"the gradient norm of step {at} is {norm}"
        if norm == 0 != expected:
            return f"the gradients of step {at} are zero"
        if relative_difference(norm, expected) > ROUNDING:
            return f"the gradient norm of step {at} is {norm:.4g}, not {expected:.4g}"
    if not math.isfinite(loss):
        return f"it is {loss}"
    if first:
        kind = "another precision or order of sums" if by <= ROUNDING else "another loss"
        return f"the forward with the same weights differs by {by:.1e}, {kind}"
    if any(relative_difference(norms[at], other_norms[at]) for at in common):
        return f"gradients differ by rounding ({by:.1e} in the loss)"
    alike = "equal" if common else "not recorded"
    return f"gradient norms before were {alike}, the update differs ({by:.1e} in the loss)"


def relative_difference(value: float, other: float) -> float:
    """Returns |value - other| over the larger absolute value: 0 if equal or both NaN, else infinity if not finite."""
    if value == other or (math.isnan(value) and math.isnan(other)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(other)):
        return math.inf
    return abs(value - other) / max(abs(value), abs(other))
