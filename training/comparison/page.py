"""The comparison's figures, and its page: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from training.comparison.canvas import png, style
from training.comparison.columns import COLUMNS, NOTE
from training.comparison.loss_figure import loss_figure
from training.comparison.memory_figure import memory_figure, memory_key
from training.comparison.rows import Row, losses
from training.comparison.table import WORDS, cells, explanations
from training.comparison.time_figure import time_figure
from training.runs.files import LOSS_FIGURE_FILE, MEMORY_FIGURE_FILE, TIME_FIGURE_FILE


@dataclass(frozen=True)
class RenderedFigure:
    """A figure as a PNG file, with its caption."""

    file: str
    caption: str
    png: bytes


def render_figures(rows: Sequence[Row]) -> list[RenderedFigure]:
    """Draws each figure for the rows that have what it shows; a figure without rows is left out.

    Memory and time are shown for rows with a finished run, losses for all rows.
    """
    timed = [row for row in rows if row.finished and row.mean("perf/step_ms")]
    # Beside runs on a GPU, a run on the CPU would seem to need no memory.
    with_memory = [row for row in timed if row.mean(memory_key(timed))]
    # A plan does not predict how long compute waits.
    with_waits = [row for row in timed if "transfer/stall_ms" in row.statistics]
    with_losses = [row for row in rows if any(losses(run.records) for run in row.measured)]
    figures = (
        (MEMORY_FIGURE_FILE, memory_figure, with_memory, _memory_caption(with_memory)),
        (TIME_FIGURE_FILE, time_figure, with_waits, TIME_CAPTION),
        (LOSS_FIGURE_FILE, loss_figure, with_losses, LOSS_CAPTION),
    )
    with style():
        return [RenderedFigure(file, caption, png(draw(shown))) for file, draw, shown, caption in figures if shown]


def _memory_caption(rows: Sequence[Row]) -> str:
    title = "Planned step time" if all(row.planned for row in rows) else "Step time"
    note = "" if all(row.fits for row in rows) else " Plans that do not fit are not on the line."
    return f"{title} against peak memory. The line joins the runs that no other beats in both.{note}"


TIME_CAPTION = "The time of a step: compute, waiting for copies, waiting for the optimizer."
LOSS_CAPTION = "Training loss. Runs whose losses are equal in every bit share a line."
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --soft: #59636e; --line: #d1d9e0; --band: #f6f8fa; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1; --line: #3d444d; --band: #151b23; }
}
body { margin: 2rem auto; max-width: 1400px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
p, figcaption { color: var(--soft); max-width: 100ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 14px; white-space: nowrap; }
th, td { padding: 0.3rem 0.6rem; border-bottom: 1px solid var(--line); text-align: right; }
th { border-bottom: 2px solid var(--line); }
th:first-child, td:first-child, .word { text-align: left; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); }
tbody tr:nth-child(even) td { background: var(--band); }
figure { margin: 2rem 0; }
figure img { display: block; width: 100%; max-width: 800px; height: auto; border-radius: 6px; background: #fff; }
code { font-size: 13px; overflow-wrap: anywhere; }
"""


def to_html(rows: Sequence[Row], figures: Sequence[RenderedFigure], title: str, common: str) -> str:
    """Returns the whole file: the table, why runs did not finish, the figures, and the directories of the runs."""
    reasons = "".join(f"<li>{escape(line)}</li>" for line in explanations(rows))
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title>
<style>{STYLE}</style>
</head>
<body>
<h1>{escape(title)}</h1>
{f"<p>The same in all runs: {escape(common)}</p>" if common else ""}
<div class="wide">
{_table(rows)}
</div>
{f"<ul>{reasons}</ul>" if reasons else ""}
<p>{escape(NOTE)}</p>
{"".join(_figure(figure) for figure in figures)}
<h2>Runs</h2>
<ul>{"".join(_directories(row) for row in rows)}</ul>
</body>
</html>
"""


def _table(rows: Sequence[Row]) -> str:
    meanings = {column.title: column.meaning for column in COLUMNS}
    texts = cells(rows)
    head = "".join(_cell("th", title, title, meanings.get(title, "")) for title in texts[0])
    lines = [
        f"<tr><td>{escape(row.name)}</td>{''.join(_cell('td', title, text) for title, text in by_title.items())}</tr>"
        for row, by_title in zip(rows, texts, strict=True)
    ]
    return f"<table>\n<thead><tr><th>run</th>{head}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody>\n</table>"


def _cell(tag: str, title: str, text: str, meaning: str = "") -> str:
    css_class = ' class="word"' if title in WORDS else ""
    hint = f' title="{escape(meaning)}"' if meaning else ""
    return f"<{tag}{css_class}{hint}>{escape(text)}</{tag}>"


def _figure(figure: RenderedFigure) -> str:
    data = base64.b64encode(figure.png).decode()
    caption = escape(figure.caption)
    image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
    return f"<figure>{image}<figcaption>{caption}</figcaption></figure>\n"


def _directories(row: Row) -> str:
    directories = ", ".join(f"<code>{escape(str(run.directory))}</code>" for run in row.runs)
    return f"<li>{escape(row.name)}: {directories}</li>"
