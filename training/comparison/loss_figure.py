"""The figures of the training losses of all runs, and of what evaluations score besides."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.comparison.canvas import LABEL_SIZE, LINE_IN, canvas, in_lines, line_colours, set_title
from training.comparison.rows import Row, losses, mean, split_by_seed

# Names of equal runs that the legend lists; it counts further ones.
NAMED = 3
# The styles of the first seven lines, of the next seven, and so on.
DASHES = ("-", "--", ":", "-.")


# What the loss of a task is; of other tasks a loss.
LOSSES = {
    "CausalLM": "training loss, nats a token",
    "FlowMatching": "training loss, squared error of the velocity",
    "Classification": "training loss, cross-entropy of the labels",
}


@dataclass(frozen=True)
class Curve:
    """The line of one row, or of several whose losses are equal in every bit."""

    label: str
    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def end(self) -> tuple[int, float] | None:
        """Step and loss of the last point that can be drawn; None if no loss is finite."""
        points = zip(self.steps, self.mean, strict=True)
        return next((point for point in reversed(list(points)) if math.isfinite(point[1])), None)

    @property
    def diverged_at(self) -> int | None:
        """The first step after the last finite loss; None if the last loss is finite."""
        return next((step for step in self.steps if self.end is None or step > self.end[0]), None)


def loss_figure(rows: Sequence[Row]) -> Figure:
    """Draws the training losses as `curve_figure` does; the axis says what the loss of the runs' task is."""
    targets = {str(task.get("_target_", "")) for row in rows for run in row.runs if (task := _task(run.config))}
    tasks = {LOSSES.get(target.rpartition(".")[2]) for target in targets}
    label = tasks.pop() if len(tasks) == 1 else None
    return curve_figure(rows, "train/loss", "Training loss", label or "training loss")


def accuracy_figure(rows: Sequence[Row]) -> Figure:
    """Draws the shares of held-out examples that were classified rightly, as `curve_figure` does."""
    return curve_figure(rows, "eval/accuracy", "Accuracy on the held-out split", "share of the examples")


def _task(config: dict[str, Any]) -> dict[str, Any]:
    task = config.get("task")
    return task if isinstance(task, dict) else {}


def curve_figure(rows: Sequence[Row], key: str, title: str, label: str) -> Figure:
    """Draws one line for each curve of the values under `key`, the mean of its seeds in a band of their range.

    The legend beside the lines names them in the order in which they end, the highest loss first; losses that are never
    finite come before all others. The picture is as high as the names need.
    """
    curves = distinct_curves(rows, key)
    figure, axes = canvas(max(5.0, 1.0 + LINE_IN * sum(curve.label.count("\n") + 1.4 for curve in curves)))
    lines, colours = [], line_colours()
    for i, curve in enumerate(curves):
        # Wide lines lie under narrow ones, so that none hides another.
        width = 1.6 + 2.0 * (len(curves) - 1 - i) / max(len(curves) - 1, 1)
        colour, dashes = colours[i % len(colours)], DASHES[i // len(colours) % len(DASHES)]
        lines += axes.plot(curve.steps, curve.mean, dashes, color=colour, linewidth=width, label=curve.label)
        if curve.end and curve.diverged_at is not None:
            axes.plot(*curve.end, "X", color=colour, markersize=7)
        elif sum(map(math.isfinite, curve.mean)) == 1:
            axes.plot(*curve.end, "o", color=colour)
        if curve.low != curve.high:
            axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    if not any(curve.end for curve in curves):
        # The numbers on the axes would not belong to these runs.
        axes.set(xticks=[], yticks=[])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01, y=0.06)
    axes.set_xlabel("step")
    axes.set_ylabel(label)
    seeds = max(len(split_by_seed(row.measured)) for row in rows)
    set_title(axes, title + (", mean and range of the seeds" if seeds > 1 else ""))
    last = [curve.end[1] if curve.end else math.inf for curve in curves]
    ordered = [lines[i] for i in sorted(range(len(curves)), key=lambda i: -last[i])]
    figure.legend(handles=ordered, loc="outside right upper", fontsize=LABEL_SIZE, labelspacing=0.4, frameon=False)
    return figure


def distinct_curves(rows: Sequence[Row], key: str = "train/loss") -> list[Curve]:
    """Returns the curves of the values under `key`; rows whose values are equal in every bit share one."""
    names: dict[str, list[str]] = {}
    members: dict[str, Row] = {}
    for row in rows:
        # Compared as text, in which NaN equals NaN. Runs that repeat each other count once.
        same = repr(sorted({(str(run.seed), repr(losses(run.records, key))) for run in row.measured}))
        names.setdefault(same, []).append(row.name)
        members[same] = row
    return [_curve(names[same], row, key) for same, row in members.items()]


def _curve(names: Sequence[str], row: Row, key: str) -> Curve:
    seeded = split_by_seed(row.measured)
    repeated = [[dict(found) for run in same if (found := losses(run.records, key))] for same in seeded]
    seeds = [{step: mean(found) for step, found in _by_step(same).items()} for same in repeated if same]
    by_step = _by_step(seeds)
    values = list(by_step.values())
    curve = Curve("", list(by_step), list(map(mean, values)), list(map(min, values)), list(map(max, values)))
    return replace(curve, label=_label(names, curve.diverged_at))


def _by_step(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    """Returns the losses of all curves at the steps that they share, or at those of the first if they share none."""
    steps = sorted(set.intersection(*map(set, curves))) or sorted(curves[0])
    return {step: [curve[step] for curve in curves if step in curve] for step in steps}


def _label(names: Sequence[str], diverged_at: int | None) -> str:
    text = ", ".join(names) if len(names) <= NAMED else f"{names[0]} and {len(names) - 1} more"
    notes = ["equal in every bit"] if len(names) > 1 else []
    if diverged_at is not None:
        notes.append(f"not finite from step {diverged_at}")
    return in_lines(": ".join([text, *([", ".join(notes)] if notes else [])]))
