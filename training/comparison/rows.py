"""One row for each set of settings: its figures over the seeds, and how they stand to the resident run's."""

import math
import statistics
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from offload.runtime.byte_sizes import GIB
from training.comparison.runs import HOST_OPTIMIZER, Run
from training.comparison.settings import all_settings, describe, find_reference
from training.metrics.files import is_number

EQUAL = "equal"
REFERENCE = "reference"


@dataclass(frozen=True)
class Figure:
    """Mean over the seeds of a row, and their standard deviation; None where one seed has no spread.

    Runs that repeat a seed count as one, which is their mean. What is not finite has no spread either.
    """

    mean: float
    spread: float | None = None


@dataclass(eq=False)
class Row:
    """Runs that differ in their seed alone. A figure that nobody measured is None."""

    name: str
    runs: list[Run]
    figures: dict[str, Figure]
    """by the names of `training.metrics.names`"""
    reference: "Row | None" = field(default=None, repr=False)
    """the resident row that this one is compared with; of a resident row itself"""
    ratio: float | None = None
    """step time to that of the reference"""
    floor_ratio: float | None = None
    """step time to the shortest that compute, bus and the host's update allow"""
    curve: str | None = None
    """whether the losses are those of the reference: equal in every bit, or the largest relative difference"""

    @property
    def measured(self) -> list[Run]:
        """The runs whose figures stand for the row: those that finished; if none did, what the others left."""
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
    def seeds(self) -> str:
        counts = Counter(run.seed for run in self.runs if run.seed is not None)
        return ", ".join(seed if count == 1 else f"{seed} ({count} runs)" for seed, count in counts.items())

    @property
    def status(self) -> str:
        """Of all runs where they agree, else how many ended in which way."""
        words = [run.status for run in self.runs]
        if len(set(words)) == 1:
            return words[0]
        return ", ".join(f"{words.count(word)} {word}" for word in dict.fromkeys(words))

    @property
    def reasons(self) -> list[str]:
        """Why runs ended as they did, each reason once."""
        return list(dict.fromkeys(run.reason for run in self.runs if run.reason not in ("", run.status)))

    def mean(self, key: str) -> float | None:
        figure = self.figures.get(key)
        return figure.mean if figure else None


def build_rows(runs: Sequence[Run]) -> list[Row]:
    """Rows in the order in which their first runs stand in `runs`."""
    groups: list[tuple[dict[str, Any], list[Run]]] = []
    for run, values in zip(runs, all_settings(runs), strict=True):
        # Where there is no configuration, nobody knows what the run repeats.
        same = next((members for other, members in groups if other == values and run.config), None)
        if same is None:
            groups.append((values, [run]))
        else:
            same.append(run)
    names = describe([members[0] for _, members in groups], [values for values, _ in groups])
    rows = [Row(name, members, {}) for name, (_, members) in zip(names, groups, strict=True)]
    for row in rows:
        row.figures = _figures(row.measured)
    candidates = [values for values, _ in groups]
    for row, values in zip(rows, candidates, strict=True):
        found = find_reference(values, [other if rows[i].finished else {} for i, other in enumerate(candidates)])
        if found is not None:
            _compare(row, rows[found])
        row.floor_ratio = _floor_ratio(row)
    return rows


def curve_difference(records: Sequence[dict[str, Any]], reference: Sequence[dict[str, Any]]) -> float | None:
    """The largest relative difference of the losses at the steps that both have logged.

    0 where they are equal in every bit, NaN to NaN included; infinity where only one is finite; None without a step
    in common.
    """
    expected = dict(losses(reference))
    pairs = [(loss, expected[step]) for step, loss in losses(records) if step in expected]
    return max((_relative(loss, other) for loss, other in pairs), default=None)


def split_by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """The runs of each seed, which repeat each other."""
    groups: dict[str | None, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.seed, []).append(run)
    return list(groups.values())


def mean(values: Sequence[float]) -> float:
    """Unlike those of `statistics`, of infinite values too."""
    return sum(values) / len(values)


def pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Which points no other beats: no other is at most as large in both coordinates and smaller in one.

    In the order of the first coordinate.
    """
    front: list[int] = []
    lowest = math.inf
    for index in sorted(range(len(points)), key=lambda i: points[i]):
        if points[index][1] < lowest or (front and points[index] == points[front[-1]]):
            front.append(index)
            lowest = points[index][1]
    return front


def _figures(runs: Sequence[Run]) -> dict[str, Figure]:
    keys = dict.fromkeys(key for run in runs for key in run.summary)
    figures = {}
    for key in keys:
        of_seeds = [[run.summary[key] for run in same if key in run.summary] for same in split_by_seed(runs)]
        if all(is_number(value) for of_seed in of_seeds for value in of_seed):
            means = [mean(of_seed) for of_seed in of_seeds if of_seed]
            known = len(means) > 1 and all(map(math.isfinite, means))
            figures[key] = Figure(mean(means), statistics.stdev(means) if known else None)
    return figures


def _compare(row: Row, reference: Row) -> None:
    row.reference = reference
    own, other = row.mean("perf/step_ms"), reference.mean("perf/step_ms")
    if own is not None and other:
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


def _floor_ratio(row: Row) -> float | None:
    """Step time over its floor: the longest of the resident step, the bytes of a direction over the bandwidth, and the
    update on the host, which is planned, because a run's own shares the memory with its copies.

    A plan is held to the floor that it planned, and so is a run that has no resident run.
    """
    own = row.mean("perf/step_ms")
    resident = row.reference.mean("perf/step_ms") if row.reference and not row.planned else None
    floor_ms = row.mean("perf/floor_ms") if resident is None else max([resident, *_copies_ms(row), *_update_ms(row)])
    return own / floor_ms if own is not None and floor_ms else None


def _copies_ms(row: Row) -> list[float]:
    # On the CPU there is no bus: what is counted there is what a device would move.
    hardware = next((run.hardware for run in row.measured if "gpu_name" in run.hardware), {})
    times_ms = []
    for way in ("h2d", "d2h"):
        moved_gib, gb_s = row.mean(f"transfer/{way}_gib"), hardware.get(f"{way}_gb_s")
        if moved_gib is not None and gb_s:
            times_ms.append(moved_gib * GIB / (gb_s * 1e6))
    return times_ms


def _update_ms(row: Row) -> list[float]:
    return [run.floors_ms[HOST_OPTIMIZER] for run in row.measured if HOST_OPTIMIZER in run.floors_ms]


def losses(records: Sequence[dict[str, Any]]) -> list[tuple[int, float]]:
    """Step and loss of the logged steps that have one."""
    complete = (record for record in records if {"train/step", "train/loss"} <= record.keys())
    return [(record["train/step"], record["train/loss"]) for record in complete]


def _relative(value: float, expected: float) -> float:
    if value == expected or (math.isnan(value) and math.isnan(expected)):
        return 0.0
    if not (math.isfinite(value) and math.isfinite(expected)):
        return math.inf
    return abs(value - expected) / max(abs(expected), abs(value))
