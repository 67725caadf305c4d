"""The losses of all runs on top of each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from training.comparison.canvas import INK, LABEL_SIZE, LINES, canvas, in_lines, settle
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


def loss_figure(rows: Sequence[Row]) -> Figure:
    """One line for each curve, the mean of its seeds in a band of their range, named at its end."""
    figure, axes = canvas(5.0)
    curves = alike(rows)
    for i, curve in enumerate(curves):
        # Wide lines lie under narrow ones, so that none hides another.
        width = 1.6 + 2.0 * (len(curves) - 1 - i) / max(len(curves) - 1, 1)
        dashes, point = "-" if i < len(LINES) else "--", "o" if len(curve.steps) == 1 else None
        axes.plot(curve.steps, curve.mean, dashes, color=LINES[i % len(LINES)], linewidth=width, marker=point)
        if curve.low != curve.high:
            axes.fill_between(curve.steps, curve.low, curve.high, color=LINES[i % len(LINES)], alpha=0.15, linewidth=0)
    axes.margins(x=0.01, y=0.06)
    axes.set_xlabel("step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
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
    return [_curve(_label(names[key]), row) for key, row in members.items()]


def _curve(label: str, row: Row) -> Curve:
    repeated = [[dict(found) for run in same if (found := losses(run.records))] for same in split_by_seed(row.measured)]
    seeds = [{step: mean(found) for step, found in _by_step(same).items()} for same in repeated if same]
    of_steps = _by_step(seeds)
    values = list(of_steps.values())
    return Curve(label, list(of_steps), list(map(mean, values)), list(map(min, values)), list(map(max, values)))


def _by_step(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    """The losses at the steps that all curves have; where there are none, at those of the first."""
    steps = sorted(set.intersection(*map(set, curves))) or sorted(curves[0])
    return {step: [curve[step] for curve in curves if step in curve] for step in steps}


def _label(names: Sequence[str]) -> str:
    if len(names) == 1:
        text = names[0]
    elif len(names) <= NAMED:
        text = f"{', '.join(names)}: equal in every bit"
    else:
        text = f"{names[0]} and {len(names) - 1} more: equal in every bit"
    return in_lines(text)


def _label_ends(figure: Figure, axes: Axes, curves: Sequence[Curve]) -> None:
    texts = [
        axes.annotate(curve.label, (1.0, 0.5), xycoords="axes fraction", xytext=(1.05, 0.5), fontsize=LABEL_SIZE)
        for curve in curves
    ]
    settle(figure)
    _, bottom, _, top = axes.bbox.extents
    heights = [text.get_window_extent(figure.canvas.get_renderer()).height * 1.15 for text in texts]
    ends = [axes.transData.transform((curve.steps[-1], curve.mean[-1])) for curve in curves]
    centres = spread([end[1] for end in ends], heights, bottom, top)
    to_axes = axes.transAxes.inverted()
    for i, (text, end, centre) in enumerate(zip(texts, ends, centres, strict=True)):
        place, start = to_axes.transform((0, centre))[1], to_axes.transform(end)
        text.set(position=(1.05, place), verticalalignment="center", color=INK)
        colour = LINES[i % len(LINES)]
        line = axes.plot((start[0], 1.04), (start[1], place), color=colour, linewidth=0.8, transform=axes.transAxes)
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
