"""Where the time of a step goes: computing, waiting for copies, waiting for the optimizer."""

from collections.abc import Sequence

from matplotlib.figure import Figure

from training.comparison.canvas import BLUE, GREEN, LABEL_SIZE, LINE_IN, ORANGE, canvas, in_lines
from training.comparison.rows import REFERENCE, Row

PARTS = (("compute", BLUE), ("waiting for copies (stall)", ORANGE), ("waiting for the optimizer", GREEN))
# Of a line of a row's name.
NAME_CHARACTERS = 36


def time_figure(rows: Sequence[Row]) -> Figure:
    """One bar a row, from top to bottom, with its length and its ratio to the resident run at its end."""
    names = [in_lines(row.name, NAME_CHARACTERS) for row in rows]
    figure, axes = canvas(1.2 + len(rows) * (0.2 + LINE_IN * max(name.count("\n") + 1 for name in names)))
    splits = [split(row) for row in rows]
    start = [0.0] * len(rows)
    for part, (name, colour) in enumerate(PARTS):
        lengths = [parts[part] for parts in splits]
        axes.barh(range(len(rows)), lengths, left=start, color=colour, height=0.66, label=name)
        start = [before + length for before, length in zip(start, lengths, strict=True)]
    longest = max(start)
    for i, (row, total) in enumerate(zip(rows, start, strict=True)):
        ratio = (
            f"  {row.ratio:.2f} \N{MULTIPLICATION SIGN} none"
            if row.ratio is not None and row.curve != REFERENCE
            else ""
        )
        axes.text(total + 0.01 * longest, i, f"{_short(total)} ms{ratio}", va="center", fontsize=LABEL_SIZE)
    axes.set_yticks(range(len(rows)), names, fontsize=LABEL_SIZE)
    axes.tick_params(axis="y", length=0)
    axes.margins(y=0.02)
    axes.invert_yaxis()
    axes.grid(False, axis="y")
    axes.set_xlim(0, 1.36 * longest)
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
    """Computing, waiting for copies, and waiting for the optimizer, in ms; together the time of a step."""
    step = row.mean("perf/step_ms")
    stall = min(row.mean("transfer/stall_ms") or 0.0, step)
    wait = min(row.mean("optimizer/wait_ms") or 0.0, step - stall)
    return step - stall - wait, stall, wait


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
