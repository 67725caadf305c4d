"""The losses of all runs on top of each other."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.comparison.canvas import INK, LABEL_SIZE, LINE_IN, LINES, canvas, in_lines, settle
from training.comparison.rows import Row, losses, mean, split_by_seed

# Names that one label may list.
NAMED = 3


@dataclass(frozen=True)
class Curve:
    """Rows whose losses are the same in every bit, as one line."""

    label: str
    steps: list[int]
    mean: list[float]
    low: list[float]
    high: list[float]

    @property
    def end(self) -> tuple[int, float] | None:
        """Step and loss of the last point that can be drawn; None where no loss is finite."""
        points = zip(self.steps, self.mean, strict=True)
        return next((point for point in reversed(list(points)) if math.isfinite(point[1])), None)

    @property
    def diverged_at(self) -> int | None:
        """The first step from which on no loss is finite."""
        return next((step for step in self.steps if self.end is None or step > self.end[0]), None)


def loss_figure(rows: Sequence[Row]) -> Figure:
    """One line for each curve, the mean of its seeds in a band of their range, named where it ends.

    The picture is as high as the names need.
    """
    curves = alike(rows)
    figure, axes = canvas(max(5.0, 1.0 + LINE_IN * sum(curve.label.count("\n") + 1 for curve in curves)))
    for i, curve in enumerate(curves):
        # Wide lines lie under narrow ones, so that none hides another.
        width = 1.6 + 2.0 * (len(curves) - 1 - i) / max(len(curves) - 1, 1)
        dashes, colour = "-" if i < len(LINES) else "--", LINES[i % len(LINES)]
        axes.plot(curve.steps, curve.mean, dashes, color=colour, linewidth=width)
        if curve.end and curve.diverged_at is not None:
            axes.plot(*curve.end, "X", color=colour, markersize=7)
        elif sum(map(math.isfinite, curve.mean)) == 1:
            axes.plot(*curve.end, "o", color=colour)
        if curve.low != curve.high:
            axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    if not any(curve.end for curve in curves):
        # The numbers at the axes would be none of these runs'.
        axes.set(xticks=[], yticks=[])
    else:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01, y=0.06)
    axes.set_xlabel("step")
    axes.set_ylabel("training loss (nats per token)")
    seeds = max(len(split_by_seed(row.measured)) for row in rows)
    axes.set_title("Training loss" + (", mean and range of the seeds" if seeds > 1 else ""))
    _label_ends(figure, axes, curves)
    return figure


def alike(rows: Sequence[Row]) -> list[Curve]:
    """The curves of `rows`, each once."""
    names: dict[str, list[str]] = {}
    members: dict[str, Row] = {}
    for row in rows:
        # As text, in which one NaN equals another and no two other numbers do; runs that repeat each other count once.
        key = repr(sorted({(str(run.seed), repr(losses(run.records))) for run in row.measured}))
        names.setdefault(key, []).append(row.name)
        members[key] = row
    return [_curve(names[key], row) for key, row in members.items()]


def _curve(names: Sequence[str], row: Row) -> Curve:
    repeated = [[dict(found) for run in same if (found := losses(run.records))] for same in split_by_seed(row.measured)]
    seeds = [{step: mean(found) for step, found in _by_step(same).items()} for same in repeated if same]
    of_steps = _by_step(seeds)
    values = list(of_steps.values())
    curve = Curve("", list(of_steps), list(map(mean, values)), list(map(min, values)), list(map(max, values)))
    return replace(curve, label=_label(names, curve.diverged_at))


def _by_step(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    """The losses at the steps that all curves have; where there are none, at those of the first."""
    steps = sorted(set.intersection(*map(set, curves))) or sorted(curves[0])
    return {step: [curve[step] for curve in curves if step in curve] for step in steps}


def _label(names: Sequence[str], diverged_at: int | None) -> str:
    text = ", ".join(names) if len(names) <= NAMED else f"{names[0]} and {len(names) - 1} more"
    notes = ["equal in every bit"] if len(names) > 1 else []
    if diverged_at is not None:
        notes.append(f"not finite from step {diverged_at}")
    return in_lines(": ".join([text, *([", ".join(notes)] if notes else [])]))


def _label_ends(figure: Figure, axes: Axes, curves: Sequence[Curve]) -> None:
    texts = [
        axes.annotate(curve.label, (1.0, 0.5), xycoords="axes fraction", xytext=(1.05, 0.5), fontsize=LABEL_SIZE)
        for curve in curves
    ]
    settle(figure)
    _, bottom, _, top = axes.bbox.extents
    heights = [text.get_window_extent(figure.canvas.get_renderer()).height * 1.15 for text in texts]
    # One that has no point is named on top, where losses that leave the picture go.
    ends = [axes.transData.transform(curve.end) if curve.end else None for curve in curves]
    centres = spread([top if end is None else end[1] for end in ends], heights, bottom, top)
    to_axes = axes.transAxes.inverted()
    for i, (curve, text, end, centre) in enumerate(zip(curves, texts, ends, centres, strict=True)):
        place = to_axes.transform((0, centre))[1]
        text.set(position=(1.05, place), verticalalignment="center", color=INK)
        if end is None:
            continue
        start, dashes = to_axes.transform(end), "-" if curve.diverged_at is None else ":"
        line = axes.plot(
            (start[0], 1.04), (start[1], place), dashes, color=LINES[i % len(LINES)], linewidth=0.8,
            transform=axes.transAxes,
        )  # fmt: skip
        line[0].set_clip_on(False)


def spread(wanted: Sequence[float], heights: Sequence[float], bottom: float, top: float) -> list[float]:
    """Centres of labels of these heights near the wanted ones, none over another; within bottom and top if they fit."""
    order = sorted(range(len(wanted)), key=lambda i: wanted[i])
    centres = list(wanted)
    edge = bottom
    for i in order:
        centres[i] = max(wanted[i], edge + heights[i] / 2)
        edge = centres[i] + heights[i] / 2
    edge = max(top, bottom + sum(heights))
    for i in reversed(order):
        centres[i] = min(centres[i], edge - heights[i] / 2)
        edge = centres[i] - heights[i] / 2
    return centres
