"""Step time against peak memory, with the runs that no other beats in both."""

from collections.abc import Sequence
from itertools import pairwise

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from training.comparison.canvas import BLUE, GREY, INK, LABEL_SIZE, canvas, in_lines, scale_for_range, settle
from training.comparison.labels import Box, is_far, place
from training.comparison.rows import Row, pareto_front

# Half the width of a point with some air around it, in pixels at 100 dots an inch.
MARKER = 6.0


def memory_figure(rows: Sequence[Row]) -> Figure:
    """One point a row, the mean of its seeds with their spread, named where it lies; the Pareto front is drawn.

    A plan for which there is no room is on no front.
    """
    key = memory_key(rows)
    points = [(row.mean(key), row.mean("perf/step_ms")) for row in rows]
    fitting = [i for i, row in enumerate(rows) if row.fits]
    front = [fitting[i] for i in pareto_front([points[i] for i in fitting])]
    figure, axes = canvas(5.2)
    axes.plot([points[i][0] for i in front], [points[i][1] for i in front], color=BLUE, linewidth=1.5, zorder=2)
    for i, (row, (x, y)) in enumerate(zip(rows, points, strict=True)):
        colour, fill = (BLUE, BLUE) if i in front else (GREY, "white")
        axes.errorbar(x, y, yerr=row.figures["perf/step_ms"].spread, color=colour, linewidth=1, capsize=2.5, zorder=2)
        axes.plot(x, y, "o", markersize=7, color=colour, markerfacecolor=fill, markeredgewidth=1.5, zorder=3)
    axes.margins(x=0.14, y=0.14)
    axes.set_xlim(left=max(axes.get_xlim()[0], 0.0))
    scale_for_range(axes, [y for _, y in points])
    gpu = key == "memory/vram_peak_gib"
    planned = "planned " if all(row.planned for row in rows) else ""
    memory = "peak GPU memory (GiB)" if gpu else "memory of the process, RSS (GiB): these runs used no GPU"
    axes.set_xlabel(f"{planned}{memory}")
    axes.set_ylabel(f"{planned}step time (ms)")
    axes.set_title(f"{planned}step time against memory: no run beats those on the line in both".capitalize())
    spreads = [row.figures["perf/step_ms"].spread or 0.0 for row in rows]
    names = [row.name if row.fits else f"{row.name}: does not fit" for row in rows]
    _label(figure, axes, points, spreads, names, front)
    return figure


def memory_key(rows: Sequence[Row]) -> str:
    """The metric that is compared: GPU memory, or on a machine without a GPU that of the process."""
    on_gpu = any(row.mean("memory/vram_peak_gib") for row in rows)
    return "memory/vram_peak_gib" if on_gpu else "memory/rss_gib"


def _label(
    figure: Figure,
    axes: Axes,
    points: Sequence[tuple[float, float]],
    spreads: Sequence[float],
    names: Sequence[str],
    front: Sequence[int],
) -> None:
    settle(figure)
    halo = [withStroke(linewidth=2, foreground="white")]
    texts = [
        axes.text(0, 0, in_lines(name), fontsize=LABEL_SIZE, color=BLUE if i in front else INK, path_effects=halo)
        for i, name in enumerate(names)
    ]
    extents = [text.get_window_extent(figure.canvas.get_renderer()) for text in texts]
    pixels = [tuple(pixel) for pixel in axes.transData.transform(points)]
    scale = figure.dpi / 100
    # A bar may go below what a logarithmic axis has.
    lowest = axes.get_ylim()[0]
    bars = [
        [tuple(end) for end in axes.transData.transform([(x, max(y - spread, lowest)), (x, y + spread)])]
        for (x, y), spread in zip(points, spreads, strict=True)
        if spread
    ]
    boxes = place(
        pixels,
        [(extent.width, extent.height) for extent in extents],
        Box(*axes.bbox.extents),
        marker=MARKER * scale,
        lines=[*pairwise(pixels[i] for i in front), *bars],
        scale=scale,
    )
    to_data = axes.transData.inverted()
    for text, box, pixel in zip(texts, boxes, pixels, strict=True):
        text.set(position=to_data.transform((box.left, box.bottom)), verticalalignment="bottom", zorder=4)
        if is_far(pixel, box, scale):
            line = to_data.transform([pixel, box.nearest(pixel)])
            # Above the bars, which would hide it where it leaves its point along one.
            axes.plot(*line.T, color=INK, linewidth=0.6, zorder=2.5, scalex=False, scaley=False)
