"""The three figures: step time against memory, where the time of a step goes, and the training losses.

The title of each says its finding. Figures are shown 800 pixels wide, and drawn at twice that size in the colours of
Okabe and Ito, which colour-blind readers can tell apart.
"""

import io
import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import matplotlib
import numpy
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from training.comparison.labels import ARROW, place_labels
from training.comparison.rows import EQUAL, REFERENCE, Row, losses, mean, pareto_front, split_by_seed
from training.runs.files import LOSS_FIGURE, MEMORY_FIGURE, TIME_FIGURE
from training.visible_text import shortened, visible

BLUE, ORANGE, GREEN, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#8C8C8C", "#262626"
LINES = (BLUE, "#D55E00", GREEN, "#CC79A7", ORANGE, "#56B4E9", GREY)
# The styles of the first seven lines, of the next seven, and so on.
DASHES = ("-", "--", ":", "-.")
WIDTH_IN, DPI = 8.0, 200
# A y axis is logarithmic if its largest value is more than this many times its smallest: else points would overlap.
LOGARITHMIC_FROM = 4.0
# Of the largest value, what an axis spans at least.
LEAST_RANGE = 0.1
LABEL_SIZE = 8.5
# Inches from one line of a label to the next.
LINE_IN = 0.17
# Characters that a figure shows of one word of a name, which may be a path.
LONGEST = 120
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    # Fonts that publishers take, and the same identifiers on every call.
    "pdf.fonttype": 42,
    "svg.hashsalt": "compare",
    # A name with two dollar signs is not a formula.
    "text.parse_math": False,
    "axes.prop_cycle": cycler(color=LINES),
}
# Names beside points; more would cover each other.
MOST_NAMED = 40
# Half the width of a point with some space around it, in pixels.
MARKER = 12.0
PARTS = (("compute", BLUE), ("waiting for copies (stall)", ORANGE), ("waiting for the optimizer", GREEN))
# What a file of each format has that differs from call to call.
UNSTABLE = {"png": "Software", "pdf": "CreationDate", "svg": "Date"}
# Names of equal runs that the legend lists; it counts further ones.
NAMED = 3
# The smallest share of a step that a finding mentions.
LEAST_SHARE = 0.01


def render_figures(rows: Sequence[Row], kind: str = "png") -> dict[str, bytes]:
    """Returns each figure that rows have something to show in, as a file of the format `kind`, by the file's name."""
    timed = [row for row in rows if row.finished and row.mean("perf/step_ms")]
    # Beside runs on a GPU, a run on the CPU would seem to need no memory.
    with_memory = [row for row in timed if row.mean(memory_key(timed))]
    # A plan does not predict how long compute waits.
    with_waits = [row for row in timed if "transfer/stall_ms" in row.statistics]
    with_losses = [row for row in rows if any(losses(run.records) for run in row.measured)]
    figures: tuple[tuple[str, Callable[[Sequence[Row]], Figure], Sequence[Row]], ...] = (
        (MEMORY_FIGURE, memory_figure, with_memory),
        (TIME_FIGURE, time_figure, with_waits),
        (LOSS_FIGURE, loss_figure, with_losses),
    )
    with style():
        return {f"{name}.{kind}": content(draw(shown), kind) for name, draw, shown in figures if shown}


def memory_figure(rows: Sequence[Row]) -> Figure:
    """Draws step time against memory: a point for each row, the mean of its seeds, with a bar for their spread.

    A line joins the Pareto front: of rows with whole steps (not forward alone) that fit their machine.
    """
    key = memory_key(rows)
    points = numpy.array([(row.mean(key), row.mean("perf/step_ms")) for row in rows])
    whole = [i for i, row in enumerate(rows) if not row.misfits and not row.forward_only]
    front = [whole[i] for i in pareto_front([tuple(points[i]) for i in whole])]
    figure, axes = canvas(5.2)
    axes.plot(
        *points[front].T,
        linewidth=1.5,
        zorder=2,
        label="Pareto front: no run beats these in both" if front[1:] else None,
    )
    spreads = [row.statistics["perf/step_ms"].spread for row in rows]
    for i, (point, spread) in enumerate(zip(points, spreads, strict=True)):
        colour, fill = (BLUE, BLUE) if i in front else (GREY, "white")
        axes.errorbar(*point, yerr=spread, color=colour, linewidth=1, capsize=2.5, zorder=2)
        axes.plot(*point, "o", markersize=7, color=colour, markerfacecolor=fill, markeredgewidth=1.5, zorder=3)
    axes.margins(x=0.2, y=0.2)
    axes.set_xlim(widened(axes.get_xlim(), points[:, 0]))
    scale_for_range(axes, points[:, 1])
    planned = "planned " if all(row.planned for row in rows) else ""
    on_gpu = key == "memory/vram_peak_gib"
    axes.set_xlabel(planned + ("peak GPU memory (GiB)" if on_gpu else "memory of the process, RSS (GiB): no GPU"))
    axes.set_ylabel(f"{planned}step time (ms)")
    finding = memory_finding([rows[i] for i in front], key)
    axes.set_title(titled(f"Planned: {finding}" if planned else finding))
    if front[1:]:
        figure.legend(loc="outside lower left", frameon=False)
    # The layout is kept from here on, so that positions in pixels stay valid.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    what = [
        ": forward only" if row.forward_only else f": does not fit the {row.misfits}" if row.misfits else ""
        for row in rows
    ]
    named = sorted([*front, *sorted(set(range(len(rows))) - set(front))][:MOST_NAMED])
    look = {"fontsize": LABEL_SIZE, "path_effects": [withStroke(linewidth=2, foreground="white")], "arrowprops": ARROW}
    texts = [
        axes.annotate(in_lines(rows[i].name + what[i]), points[i], points[i], color=BLUE if i in front else INK, **look)
        for i in named
    ]
    # Of the points and their bars, in pixels. A bar may reach below a logarithmic axis.
    lows = [(x, max(y - (spread or 0.0), axes.get_ylim()[0])) for (x, y), spread in zip(points, spreads, strict=True)]
    highs = [(x, y + (spread or 0.0)) for (x, y), spread in zip(points, spreads, strict=True)]
    corners = zip(axes.transData.transform(lows) - MARKER, axes.transData.transform(highs) + MARKER, strict=True)
    place_labels(axes, texts, [Bbox(each) for each in corners], points[front])
    return figure


def memory_key(rows: Sequence[Row]) -> str:
    """Returns the metric to compare: peak GPU memory, or RSS where no run used a GPU."""
    on_gpu = any(row.mean("memory/vram_peak_gib") for row in rows)
    return "memory/vram_peak_gib" if on_gpu else "memory/rss_gib"


def time_figure(rows: Sequence[Row]) -> Figure:
    """Draws one bar for each row, from top to bottom, with step time and ratio to the resident run at its end."""
    names = [in_lines(row.name, 36) for row in rows]
    lengths = [in_lines(_length(row), 22) for row in rows]
    figure, axes = canvas(1.2 + len(rows) * (0.2 + LINE_IN * max(text.count("\n") + 1 for text in names + lengths)))
    splits = numpy.array([waits(row) for row in rows])
    for part, (name, colour) in enumerate(PARTS):
        start = splits[:, :part].sum(1)
        bars = axes.barh(range(len(rows)), splits[:, part], left=start, color=colour, height=0.66, label=name)
    axes.bar_label(bars, lengths, padding=4, fontsize=LABEL_SIZE)
    # The axis ends with the longest bar. The layout makes room for the text behind it.
    axes.set_xlim(0, splits.sum(1).max())
    axes.set_yticks(range(len(rows)), names, fontsize=LABEL_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("time of one step (ms)")
    figure.legend(
        *axes.get_legend_handles_labels(),
        title=titled(time_finding(rows)),
        title_fontproperties={"size": 11, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=len(PARTS),
        frameon=False,
    )
    return figure


@dataclass(frozen=True)
class Curve:
    """The losses of one row, or of several whose losses are equal in every bit: mean and range of the seeds."""

    names: list[str]
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

    @property
    def label(self) -> str:
        first, *others = self.names
        text = ", ".join(self.names) if len(self.names) <= NAMED else f"{first} and {len(others)} more"
        notes = ["equal in every bit"] if others else []
        notes += [f"not finite from step {self.diverged_at}"] if self.diverged_at is not None else []
        return in_lines(f"{text}: {', '.join(notes)}" if notes else text)


def loss_figure(rows: Sequence[Row]) -> Figure:
    """Draws the training loss of each row: the mean of its seeds, in a band from the smallest to the largest.

    The legend begins with the highest last loss.
    """
    curves = distinct_curves(rows)
    figure, axes = canvas(max(5.0, 1.0 + LINE_IN * sum(curve.label.count("\n") + 1.4 for curve in curves)))
    lines = []
    for i, curve in enumerate(curves):
        # Wide lines lie under narrow ones, so that none hides another.
        width = 1.6 + 2.0 * (len(curves) - 1 - i) / max(len(curves) - 1, 1)
        colour, dashes = LINES[i % len(LINES)], DASHES[i // len(LINES) % len(DASHES)]
        lines += axes.plot(curve.steps, curve.mean, dashes, color=colour, linewidth=width, label=curve.label)
        if curve.end and curve.diverged_at is not None:
            axes.plot(*curve.end, "X", color=colour, markersize=7)
        elif sum(map(math.isfinite, curve.mean)) == 1:
            axes.plot(*curve.end, "o", color=colour)
        if curve.low != curve.high:
            axes.fill_between(curve.steps, curve.low, curve.high, color=colour, alpha=0.15, linewidth=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.01, y=0.06)
    axes.set_xlabel("step")
    finite = [value for curve in curves for value in curve.mean if math.isfinite(value)]
    if finite:
        axes.set_ylim(widened(axes.get_ylim(), finite))
    seeds = max(len(split_by_seed(row.measured)) for row in rows)
    axes.set_ylabel("training loss" + (", mean and range of the seeds" if seeds > 1 else ""))
    axes.set_title(titled(loss_finding(rows)))
    last = [curve.end[1] if curve.end else math.inf for curve in curves]
    ordered = [lines[i] for i in sorted(range(len(curves)), key=lambda i: -last[i])]
    figure.legend(handles=ordered, loc="outside right upper", fontsize=LABEL_SIZE, labelspacing=0.4, frameon=False)
    return figure


def distinct_curves(rows: Sequence[Row]) -> list[Curve]:
    """Returns the curves of the training losses; rows whose losses are equal in every bit share one."""
    alike: dict[str, list[Row]] = {}
    for row in rows:
        # Compared as text, in which NaN equals NaN. Runs that repeat each other count once.
        same = repr(sorted({(str(run.seed), repr(losses(run.records))) for run in row.measured}))
        alike.setdefault(same, []).append(row)
    return [_curve(equal) for equal in alike.values()]


def style():
    """Returns a context in which figures have the style of this file, whatever the user's own style is."""
    return matplotlib.rc_context(matplotlib.rcParamsDefault | STYLE)


def canvas(height_in: float) -> tuple[Figure, Axes]:
    """Makes an empty figure without pyplot, so that it is freed when unused and needs no window system."""
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def content(figure: Figure, kind: str) -> bytes:
    """Returns the figure as the bytes of a PNG, PDF or SVG file, the same on every call."""
    file = io.BytesIO()
    figure.savefig(file, format=kind, metadata={UNSTABLE[kind]: None})
    return file.getvalue()


def titled(finding: str) -> str:
    """Breaks a finding into lines that are as wide as a figure."""
    return in_lines(finding, 72)


def in_lines(text: str, characters: int = 26) -> str:
    """Breaks a name into lines of at most `characters`; a word longer than LONGEST loses its middle."""
    words = " ".join(shortened(visible(word), LONGEST) for word in text.split())
    return "\n".join(textwrap.wrap(words, characters, break_on_hyphens=False))


def scale_for_range(axes: Axes, values: Sequence[float]) -> None:
    """Makes the y axis logarithmic, with plain numbers at its ticks, if `values` are far apart."""
    if max(values) <= LOGARITHMIC_FROM * min(values):
        axes.set_ylim(widened(axes.get_ylim(), values))
        if min(values) < 0.5 * max(values):
            axes.set_ylim(bottom=0)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())


def widened(limits: tuple[float, float], values: Sequence[float]) -> tuple[float, float]:
    """Returns limits of an axis that are LEAST_RANGE of the largest value apart: a small difference looks small."""
    low, high = limits
    more = max(LEAST_RANGE * max(values) - (high - low), 0.0) / 2
    return max(low - more, 0.0), high + more


def _length(row: Row) -> str:
    step_ms = row.mean("perf/step_ms")
    step = f"{step_ms:,.0f} ms" if step_ms >= 100 else f"{step_ms:.3g} ms"
    if row.ratio is None or row.reference is row:
        return step
    return f"{step}, {row.ratio:.2f} \N{MULTIPLICATION SIGN} {row.reference.name}"


def _curve(equal: Sequence[Row]) -> Curve:
    seeds = []
    for repeated in split_by_seed(equal[0].measured):
        if found := [losses(run.records) for run in repeated if losses(run.records)]:
            seeds.append({step: mean(values) for step, values in _by_step(found).items()})
    by_step = _by_step(seeds)
    ranges = ([of(values) for values in by_step.values()] for of in (mean, min, max))
    return Curve([row.name for row in equal], list(by_step), *ranges)


def _by_step(curves: Sequence[dict[int, float]]) -> dict[int, list[float]]:
    """Returns the losses of all curves at the steps that they share, or at those of the first if they share none."""
    steps = sorted(set.intersection(*map(set, curves))) or sorted(curves[0])
    return {step: [curve[step] for curve in curves if step in curve] for step in steps}


def memory_finding(front: Sequence[Row], key: str) -> str:
    """Says which share of its reference's memory and step time the row with the least memory takes.

    `front` are the rows of the Pareto front, the least memory first; `key` is the metric of memory.
    """
    for row in front:
        memory = row.reference.mean(key) if row.reference and row.reference is not row else None
        if memory and row.ratio is not None:
            share = row.mean(key) / memory
            return f"{row.name}: {share:.2f} of the memory and {row.ratio:.2f} of the step time of {row.reference.name}"
    # A front of one row: no other row has less memory or takes less time.
    return (
        f"{front[0].name} takes the least memory and the least time" if len(front) == 1 else "Step time against memory"
    )


def waits(row: Row) -> tuple[float, float, float]:
    """Returns the ms of a step spent on compute, on waiting for copies and on waiting for the optimizer."""
    step = row.mean("perf/step_ms")
    stall = min(row.mean("transfer/stall_ms") or 0.0, step)
    wait = min(row.mean("optimizer/wait_ms") or 0.0, step - stall)
    return step - stall - wait, stall, wait


def time_finding(rows: Sequence[Row]) -> str:
    """Says which row waits longest, as a share of its step, and for what."""
    shares = [(row, *(part / row.mean("perf/step_ms") for part in waits(row))) for row in rows]
    row, computes, copies, updates = min(shares, key=lambda each: each[1])
    if computes > 1 - LEAST_SHARE:
        return "No run waits for copies or for the optimizer"
    what = [f"{copies:.0%} of its step for copies"] if copies >= LEAST_SHARE else []
    what += [f"{updates:.0%} of its step for the optimizer"] if updates >= LEAST_SHARE else []
    return f"{row.name} waits longest: {' and '.join(what) or f'{copies + updates:.0%} of its step'}"


def loss_finding(rows: Sequence[Row]) -> str:
    """Says how many rows have the same losses as their reference in every bit, and how far the other rows are off."""
    curves = [row.curve for row in rows if row.curve not in (None, REFERENCE)]
    differing = [curve for curve in curves if curve != EQUAL]
    if not curves:
        return "Training loss"
    if not differing:
        return "All losses are equal in every bit to those of the resident run"
    count = len(curves) - len(differing)
    start = f"{count} of {len(curves)} runs have the losses of the resident run in every bit; " if count else ""
    return f"{start}{'others' if count else 'losses'} differ by up to {max(differing, key=float)}".capitalize()
