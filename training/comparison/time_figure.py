"""The figure of where the time of a step goes: compute, waiting for copies, waiting for the optimizer."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from training.comparison.canvas import BLUE, GREEN, LABEL_SIZE, LINE_IN, ORANGE, canvas, in_lines
from training.comparison.rows import Row

PARTS = (("compute", BLUE), ("waiting for copies (stall)", ORANGE), ("waiting for the optimizer", GREEN))
# Characters in a line of a row's name.
NAME_CHARACTERS = 36
# Characters in a line at the end of a bar, where there is less room.
LENGTH_CHARACTERS = 22


def time_figure(rows: Sequence[Row]) -> Figure:
    """Draws one bar for each row, from top to bottom, with step time and ratio to the resident run at its end."""
    names = [in_lines(row.name, NAME_CHARACTERS) for row in rows]
    lengths = [in_lines(_length(row), LENGTH_CHARACTERS) for row in rows]
    figure, axes = canvas(1.2 + len(rows) * (0.2 + LINE_IN * max(text.count("\n") + 1 for text in names + lengths)))
    splits = [split(row) for row in rows]
    start = [0.0] * len(rows)
    for part, (name, colour) in enumerate(PARTS):
        times_ms = [parts[part] for parts in splits]
        bars = axes.barh(range(len(rows)), times_ms, left=start, color=colour, height=0.66, label=name)
        start = [before + time_ms for before, time_ms in zip(start, times_ms, strict=True)]
    axes.bar_label(bars, lengths, padding=4, fontsize=LABEL_SIZE)
    # The axis ends with the longest bar. The layout makes room for the text behind it.
    axes.set_xlim(0, max(start))
    axes.set_yticks(range(len(rows)), names, fontsize=LABEL_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlabel("time of one step (ms)")
    figure.legend(
        *axes.get_legend_handles_labels(),
        title="Where the time of a step goes",
        title_fontproperties={"size": 11, "weight": "bold"},
        alignment="left",
        loc="outside upper left",
        ncols=len(PARTS),
        frameon=False,
    )
    return figure


def split(row: Row) -> tuple[float, float, float]:
    """Returns the ms of a step spent on compute, on waiting for copies and on waiting for the optimizer."""
    step = row.mean("perf/step_ms")
    stall = min(row.mean("transfer/stall_ms") or 0.0, step)
    wait = min(row.mean("optimizer/wait_ms") or 0.0, step - stall)
    return step - stall - wait, stall, wait


def _length(row: Row) -> str:
    step = f"{_short(row.mean('perf/step_ms'))} ms"
    if row.ratio is None or row.reference is row:
        return step
    return f"{step}, {row.ratio:.2f} \N{MULTIPLICATION SIGN} {row.reference.name}"


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
