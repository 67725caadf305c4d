"""The comparison's figures, and its page: one HTML file that needs no network, no script and no other file."""

from __future__ import annotations

import base64
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape as html_escape

from matplotlib.figure import Figure

from training.comparison.canvas import png, style
from training.comparison.columns import COLUMNS, MISSING, NOTE
from training.comparison.loss_figure import accuracy_figure, loss_figure
from training.comparison.memory_figure import MOST_NAMED, memory_figure, memory_key
from training.comparison.rows import EQUAL, REFERENCE, Row, losses
from training.comparison.samples import LastSample, last_samples
from training.comparison.table import WORDS, cells, explanations
from training.comparison.time_figure import time_figure
from training.runs.files import ACCURACY_FIGURE_FILE, LOSS_FIGURE_FILE, MEMORY_FIGURE_FILE, TIME_FIGURE_FILE
from training.visible_text import visible


@dataclass(frozen=True)
class RenderedFigure:
    """A figure as a PNG file, with its caption, and as another one for pages in dark mode."""

    file: str
    caption: str
    png: bytes
    dark_png: bytes


def render_figures(rows: Sequence[Row]) -> list[RenderedFigure]:
    """Draws each figure for the rows that have what it shows; a figure without rows is left out.

    Memory and time are shown for rows with a finished run, losses and accuracies for all rows.
    """
    timed = [row for row in rows if row.finished and row.mean("perf/step_ms")]
    # Beside runs on a GPU, a run on the CPU would seem to need no memory.
    with_memory = [row for row in timed if row.mean(memory_key(timed))]
    # A plan does not predict how long compute waits.
    with_waits = [row for row in timed if "transfer/stall_ms" in row.statistics]
    with_losses = [row for row in rows if any(losses(run.records) for run in row.measured)]
    with_accuracy = [row for row in rows if any(losses(run.records, "eval/accuracy") for run in row.measured)]
    figures = (
        (MEMORY_FIGURE_FILE, memory_figure, with_memory, _memory_caption(with_memory)),
        (TIME_FIGURE_FILE, time_figure, with_waits, TIME_CAPTION),
        (LOSS_FIGURE_FILE, loss_figure, with_losses, LOSS_CAPTION),
        (ACCURACY_FIGURE_FILE, accuracy_figure, with_accuracy, ACCURACY_CAPTION),
    )
    return [
        RenderedFigure(file, caption, _drawn(draw, shown, dark=False), _drawn(draw, shown, dark=True))
        for file, draw, shown, caption in figures
        if shown
    ]


def _drawn(draw: Callable[[Sequence[Row]], Figure], rows: Sequence[Row], dark: bool) -> bytes:
    with style(dark):
        return png(draw(rows))


def _memory_caption(rows: Sequence[Row]) -> str:
    title = "Planned step time" if all(row.planned for row in rows) else "Step time"
    note = "" if all(row.fits for row in rows) else " Plans that do not fit are not on the line."
    if len(rows) > MOST_NAMED:
        note += f" Of these {len(rows)} runs {MOST_NAMED} are named, those on the line first."
    return f"{title} against peak memory. The line joins the runs that no other beats in both.{note}"


# The statuses of runs with which nothing is wrong.
FINE = ("ok", "stopped", "planned", "running")
# Machines, versions and dates that the page lists of each; it counts further ones.
NAMED = 4
TIME_CAPTION = "The time of a step: compute, waiting for copies, waiting for the optimizer."
LOSS_CAPTION = "Training loss. Runs whose losses are equal in every bit share a line."
ACCURACY_CAPTION = "Accuracy on the held-out split. Runs whose accuracies are equal share a line."
STYLE = """
:root { color-scheme: light dark; --ink: #1f2328; --paper: #ffffff; --soft: #59636e; --line: #d1d9e0; --band: #f6f8fa;
  --good: #1a7f37; --bad: #cf222e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --paper: #0d1117; --soft: #9198a1; --line: #3d444d; --band: #151b23;
    --good: #3fb950; --bad: #f85149; }
}
body { margin: 2rem auto; max-width: 1400px; padding: 0 1rem; background: var(--paper); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; overflow-wrap: anywhere; }
p, figcaption { color: var(--soft); max-width: 100ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid var(--line); vertical-align: bottom; white-space: normal; }
th:first-child, td:first-child, .word { text-align: left; white-space: normal; overflow-wrap: break-word; }
td:first-child, td[data-title="compared with"] { min-width: 9rem; overflow-wrap: anywhere; }
.good { color: var(--good); font-weight: 600; }
.bad { color: var(--bad); font-weight: 600; }
li { overflow-wrap: anywhere; }
td:first-child, th:first-child { position: sticky; left: 0; background: var(--paper); }
tbody tr:nth-child(even) td { background: var(--band); }
figure { margin: 2rem 0; }
figure img { display: block; width: 100%; max-width: 800px; height: auto; border-radius: 6px; }
code { font-size: 13px; overflow-wrap: anywhere; }
.samples { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 210px), 1fr)); gap: 1rem; }
.samples.texts { grid-template-columns: repeat(auto-fill, minmax(min(100%, 420px), 1fr)); }
.samples figure { margin: 0; min-width: 0; }
.samples figure img { width: 100%; border-radius: 0; image-rendering: pixelated; }
.samples figcaption { overflow-wrap: anywhere; }
.samples strong { color: var(--ink); }
pre { margin: 0; padding: 0.6rem; max-height: 20rem; overflow-y: auto; background: var(--band); font-size: 12.5px;
  white-space: pre-wrap; overflow-wrap: anywhere; border: 1px solid var(--line); border-radius: 6px; }
/* On a phone each row is a card: a line for each value, with the column's title before it. */
@media (max-width: 700px) {
  body { margin: 1rem auto; }
  table, tbody, tr, td { display: block; }
  thead { display: none; }
  tr { margin-bottom: 1rem; border: 1px solid var(--line); border-radius: 6px; overflow: hidden; }
  td, td:first-child, td.word { display: flex; justify-content: space-between; gap: 1rem; text-align: right;
    white-space: normal; overflow-wrap: anywhere; position: static; }
  td::before { content: attr(data-title); color: var(--soft); font-weight: 400; white-space: nowrap; }
  td:first-child { font-weight: 600; text-align: left; background: var(--band); }
  td:first-child::before { content: none; }
  td.missing, td.word.missing { display: none; }
  tr:last-child td:last-child, td:last-child { border-bottom: 0; }
  tbody tr:nth-child(even) td:not(:first-child) { background: none; }
  ul { padding-left: 1.2rem; }
  .samples { grid-template-columns: repeat(2, minmax(0, 1fr)); }
  .samples.texts { grid-template-columns: minmax(0, 1fr); }
  figure { overflow-x: auto; }
  figure img { width: 640px; max-width: none; }
}
"""


def to_html(rows: Sequence[Row], figures: Sequence[RenderedFigure], title: str, common: str) -> str:
    """Returns the whole file: where the runs ran, the table, why runs did not finish, figures, samples, commands."""
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
{f"<p>{escape(origin)}</p>" if (origin := origins(rows)) else ""}
{f"<p>The same in all runs: {escape(common)}</p>" if common else ""}
<div class="wide">
{_table(rows)}
</div>
{f"<ul>{reasons}</ul>" if reasons else ""}
<p>{escape(NOTE)}</p>
{"".join(_figure(figure) for figure in figures)}
{_samples(last_samples(rows))}
<h2>Runs</h2>
<ul>{"".join(_commands(row) for row in rows)}</ul>
</body>
</html>
"""


def _table(rows: Sequence[Row]) -> str:
    meanings = {column.title: column.meaning for column in COLUMNS}
    texts = [_proof_first(by_title) for by_title in cells(rows)]
    head = "".join(_cell("th", title, title, meanings.get(title, "")) for title in texts[0])
    lines = [
        f"<tr><td>{escape(row.name)}</td>{''.join(_cell('td', title, text) for title, text in by_title.items())}</tr>"
        for row, by_title in zip(rows, texts, strict=True)
    ]
    return f"<table>\n<thead><tr><th>run</th>{head}</tr></thead>\n<tbody>\n{chr(10).join(lines)}\n</tbody>\n</table>"


def _proof_first(by_title: dict[str, str]) -> dict[str, str]:
    """Puts the columns of words first, which say whether a run counts, and the seeds last."""
    proof = {title: by_title[title] for title in WORDS if title in by_title and title != "seeds"}
    return proof | by_title | {"seeds": by_title["seeds"]}


def _cell(tag: str, title: str, text: str, meaning: str = "") -> str:
    classes = " ".join(["word"] * (title in WORDS) + ([_verdict(title, text)] if tag == "td" else []))
    css_class = f' class="{classes.strip()}"' if classes.strip() else ""
    hint = f' title="{escape(meaning)}"' if meaning else ""
    label = f' data-title="{escape(title)}"' if tag == "td" else ""
    return f"<{tag}{css_class}{hint}{label}>{escape(text)}</{tag}>"


def _verdict(title: str, text: str) -> str:
    """Returns the class of a cell: good or bad, which colour it, missing, which a phone leaves out, or none."""
    if text == MISSING:
        return "missing"
    if title == "curve" and text != REFERENCE:
        return "good" if text == EQUAL else "bad"
    return "bad" if title == "status" and text not in FINE else ""


def _figure(figure: RenderedFigure) -> str:
    light, dark = (
        f"data:image/png;base64,{base64.b64encode(content).decode()}" for content in (figure.png, figure.dark_png)
    )
    caption = escape(figure.caption)
    image = f'<img src="{light}" alt="{caption}">'
    picture = f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">{image}</picture>'
    return f"<figure>{picture}<figcaption>{caption}</figcaption></figure>\n"


def _samples(samples: Sequence[LastSample]) -> str:
    """Returns the section of the last samples, pictures before texts; it is empty without samples."""
    pictures = [_sample(sample) for sample in samples if sample.picture is not None]
    texts = [_sample(sample) for sample in samples if sample.picture is None]
    grids = [f'<div class="samples">\n{"".join(pictures)}</div>'] if pictures else []
    grids += [f'<div class="samples texts">\n{"".join(texts)}</div>'] if texts else []
    return "\n".join(["<h2>Last samples</h2>", *grids]) if grids else ""


def _sample(sample: LastSample) -> str:
    if sample.picture is None:
        lines = "\n".join(escape(line) for line in sample.text.split("\n"))
        shown, caption = f'<pre tabindex="0">{lines}</pre>', ""
    else:
        encoded = base64.b64encode(sample.picture).decode()
        alt = escape(f"{sample.row}: {sample.text}")
        shown, caption = f'<img src="data:image/png;base64,{encoded}" alt="{alt}">', f", {sample.text}"
    equal = f", the same as {sample.equal_to}" if sample.equal_to is not None else ""
    about = escape(f"after step {sample.step}{caption}{equal}")
    return f"<figure>{shown}<figcaption><strong>{escape(sample.row)}</strong> {about}</figcaption></figure>\n"


def _commands(row: Row) -> str:
    runs = [
        f"<code>{escape(run.command)}</code> in <code>{escape(str(run.directory))}</code>"
        if run.command
        else f"<code>{escape(str(run.directory))}</code>"
        for run in row.runs
    ]
    return f"<li>{escape(row.name)}: {'<br>'.join(runs)}</li>"


def origins(rows: Sequence[Row]) -> str:
    """Returns machine, torch version, commit and date of the runs, as far as they are known; all values of each."""
    parts = []
    for key, label in (("machine", ""), ("torch", "torch "), ("commit", "commit "), ("date", "")):
        found = [run.origin[key] for row in rows for run in row.runs if key in run.origin]
        # The date of a date and time.
        values = sorted({value[:10] if key == "date" else value for value in found})
        more = [f"{len(values) - NAMED} more"] if len(values) > NAMED else []
        parts += [label + ", ".join([*values[:NAMED], *more])] if values else []
    return " · ".join(parts)


def escape(text: str) -> str:
    """Returns HTML that shows the text as it is."""
    return html_escape(visible(text))
