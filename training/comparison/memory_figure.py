"""The figure of step time against peak memory, with the runs that no other run beats in both."""

from collections.abc import Sequence
from itertools import pairwise

import numpy
from adjustText import adjust_text
from matplotlib import rcParams
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.transforms import Bbox

from training.comparison.canvas import (
    GREY,
    LABEL_SIZE,
    canvas,
    fix_layout,
    in_lines,
    line_colours,
    scale_for_range,
    set_title,
)
from training.comparison.rows import Row, pareto_front

# Half the width of a point with some space around it, in pixels.
MARKER = 12.0
# Pixels between two points of a line that labels avoid; shorter than any label is high.
SPACING = 18.0
# A budget of more than this many times the largest point is named and not drawn; of many budgets a few are named.
FARTHEST, MOST_BUDGETS = 3.0, 3
# Names beside points; more would cover each other, and take minutes to place.
MOST_NAMED = 40
# How adjustText moves labels. Of 80 random comparisons of 2 to 10 runs, in which a quarter of the points nearly
# coincided, 7 had a label over a point or another label; with the library's defaults 30 had.
# A limit in iterations, unlike one in seconds, gives the same figure on every machine.
FORCES = {
    "force_text": (0.6, 0.8),
    "max_move": 30,
    "prevent_crossings": False,
    "iter_lim": 500,
}


def memory_figure(rows: Sequence[Row]) -> Figure:
    """Draws a point for each row, the mean of its seeds with a bar for their spread, and the Pareto front.

    At most MOST_NAMED points are named. A plan that does not fit and a forward without its backward are not part of the
    front. A dashed line is a budget that plans were to fit in.
    """
    key = memory_key(rows)
    points = numpy.array([(row.mean(key), row.mean("perf/step_ms")) for row in rows])
    spreads = [row.statistics["perf/step_ms"].spread for row in rows]
    whole = [i for i, row in enumerate(rows) if row.fits and not row.forward_only]
    front = [whole[i] for i in pareto_front([tuple(points[i]) for i in whole])]
    figure, axes = canvas(5.2)
    axes.plot(*points[front].T, color=line_colours()[0], linewidth=1.5, zorder=2)
    for i, ((x, y), spread) in enumerate(zip(points, spreads, strict=True)):
        colour, fill = (line_colours()[0],) * 2 if i in front else (GREY, rcParams["axes.facecolor"])
        axes.errorbar(x, y, yerr=spread, color=colour, linewidth=1, capsize=2.5, zorder=2)
        axes.plot(x, y, "o", markersize=7, color=colour, markerfacecolor=fill, markeredgewidth=1.5, zorder=3)
    axes.margins(x=0.2, y=0.2)
    axes.set_xlim(left=max(axes.get_xlim()[0], 0.0))
    budgets = budgets_gib(rows)
    drawn = [budget for budget in budgets if budget <= FARTHEST * points[:, 0].max()]
    axes.set_xlim(right=max([axes.get_xlim()[1], *(1.05 * budget for budget in drawn)]))
    for budget in drawn:
        axes.axvline(budget, color=line_colours()[1], linestyle="--", linewidth=1.2, zorder=1)
    scale_for_range(axes, points[:, 1])
    planned = "planned " if all(row.planned for row in rows) else ""
    on_gpu = key == "memory/vram_peak_gib"
    memory = "peak GPU memory (GiB)" if on_gpu else "memory of the process, RSS (GiB): these runs used no GPU"
    limits = ", ".join(f"{budget:,.4g}{' (dashed)' if budget in drawn else ''}" for budget in budgets[:MOST_BUDGETS])
    axes.set_xlabel(f"{planned}{memory}{f'; budget {limits}' if limits else ''}")
    axes.set_ylabel(f"{planned}step time (ms)")
    set_title(axes, f"{planned}step time against memory: no run beats those on the line in both".capitalize())
    fix_layout(figure)
    _add_labels(axes, rows, points, spreads, front)
    return figure


def memory_key(rows: Sequence[Row]) -> str:
    """Returns the metric to compare: peak GPU memory, or RSS where no run used a GPU."""
    on_gpu = any(row.mean("memory/vram_peak_gib") for row in rows)
    return "memory/vram_peak_gib" if on_gpu else "memory/rss_gib"


def budgets_gib(rows: Sequence[Row]) -> list[float]:
    """Returns the budgets of plans in the memory that the figure compares, each once."""
    kind = "device" if memory_key(rows) == "memory/vram_peak_gib" else "host"
    plans = [run for row in rows for run in row.measured if run.planned]
    return sorted({run.budget_gib[kind] for run in plans if kind in run.budget_gib})


def _add_labels(
    axes: Axes, rows: Sequence[Row], points: numpy.ndarray, spreads: Sequence[float | None], front: Sequence[int]
) -> None:
    """Writes each row's name beside its point, clear of labels, points, bars and the front if there is room.

    Of more than MOST_NAMED rows it names those on the front first.
    """
    named = sorted([*front, *sorted(set(range(len(rows))) - set(front))][:MOST_NAMED])
    halo = [withStroke(linewidth=2, foreground=rcParams["axes.facecolor"])]
    shown = [rows[i] for i in named]
    names = [in_lines(_name(row)) for row in shown]
    style = {"ha": "center", "va": "center", "fontsize": LABEL_SIZE, "path_effects": halo, "zorder": 4}
    texts = [
        axes.text(x, y, name, color=line_colours()[0] if i in front else rcParams["text.color"], **style)
        for i, name, (x, y) in zip(named, names, points[named], strict=True)
    ]
    x, y = _along(axes, points[front]).T
    adjust_text(
        texts,
        x,
        y,
        objects=[_box(axes, point, spread or 0.0) for point, spread in zip(points, spreads, strict=True)],
        target_x=points[named, 0],
        target_y=points[named, 1],
        avoid_self=False,
        ax=axes,
        # Above the bars, which would hide a line that leaves its point along one.
        arrowprops={"arrowstyle": "-", "color": rcParams["text.color"], "linewidth": 0.6, "zorder": 2.5, "shrinkB": 3},
        **FORCES,
    )


def _name(row: Row) -> str:
    if row.forward_only:
        return f"{row.name}: forward only"
    return row.name if row.fits else f"{row.name}: does not fit the {row.misfits}"


def _box(axes: Axes, point: numpy.ndarray, spread: float) -> Bbox:
    """Returns the box around a point and its bar, in the units of the data."""
    # A bar may reach below a logarithmic axis.
    ends = [(point[0], max(point[1] - spread, axes.get_ylim()[0])), (point[0], point[1] + spread)]
    low, high = axes.transData.transform(ends)
    return Bbox(axes.transData.inverted().transform([low - MARKER, high + MARKER]))


def _along(axes: Axes, corners: numpy.ndarray) -> numpy.ndarray:
    """Returns points along the line through `corners`, at most SPACING pixels apart, in the units of the data."""
    pixels = axes.transData.transform(corners)
    counts = [2 + int(numpy.hypot(*(end - start)) / SPACING) for start, end in pairwise(pixels)]
    pieces = [numpy.linspace(*ends, count) for ends, count in zip(pairwise(pixels), counts, strict=True)]
    return axes.transData.inverted().transform(numpy.concatenate([pixels[:1], *pieces]))
