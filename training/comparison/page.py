"""The comparison's page: one HTML file that needs no network, no script and no other file."""

import base64
from collections.abc import Sequence
from html import escape as html_escape

from training.comparison.rows import EQUAL, REFERENCE, Row
from training.comparison.table import MISSING, NOTE, WORDS, cells, explanations
from training.runs.files import LOSS_FIGURE, MEMORY_FIGURE, TIME_FIGURE
from training.visible_text import visible

CAPTIONS = {
    MEMORY_FIGURE: "Step time against peak memory. The Pareto front joins the runs that no other beats in both, without"
    " plans that do not fit.",
    TIME_FIGURE: "The time of a step: compute, waiting for copies, waiting for the optimizer.",
    LOSS_FIGURE: "Training loss. Runs whose losses are equal in every bit share a line.",
}
# The statuses of runs with which nothing is wrong.
FINE = ("ok", "stopped", "planned", "running")
# Machines, versions and dates that the page lists of each; it counts further ones.
NAMED = 4
STYLE = """
body { margin: 2rem auto; max-width: 1400px; padding: 0 1rem; color: #1f2328; font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; }
h1, li, code { overflow-wrap: anywhere; }
p, figcaption { color: #59636e; max-width: 100ch; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: 13.5px; }
th, td { padding: 0.3rem 0.5rem; border-bottom: 1px solid #d1d9e0; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #d1d9e0; vertical-align: bottom; white-space: normal; }
.word { text-align: left; white-space: normal; min-width: 5.5rem; overflow-wrap: anywhere; }
.name { min-width: 9rem; }
.good { color: #1a7f37; font-weight: 600; }
.bad { color: #cf222e; font-weight: 600; }
figure { margin: 2rem 0; }
figure img { display: block; width: 100%; max-width: 800px; height: auto; }
/* On a phone the figures come before the table. */
@media (max-width: 700px) { main { display: flex; flex-direction: column; } .table { order: 1; } }
"""


def to_html(rows: Sequence[Row], figures: dict[str, bytes], title: str, common: str) -> str:
    """Returns the whole file: where the runs ran, the table, why runs did not finish, figures, commands."""
    # The columns of words first, which say whether a run counts, and the seeds last.
    titles = sorted(cells(rows)[0], key=lambda title: (title == "seeds", title not in WORDS))
    texts = [{title: text[title] for title in titles} for text in cells(rows)]
    commands = [
        f"<li>{escape(row.name)}: "
        + "<br>".join(
            f"<code>{escape(run.command)}</code> in " * bool(run.command) + f"<code>{escape(str(run.directory))}</code>"
            for run in row.runs
        )
        + "</li>"
        for row in rows
    ]
    head = "".join(f"<th{_class(title)}>{escape(title)}</th>" for title in texts[0])
    lines = [
        "<tr>" + "".join(f"<td{_class(title, text)}>{escape(text)}</td>" for title, text in by_title.items()) + "</tr>"
        for by_title in ({"run": row.name, **text} for row, text in zip(rows, texts, strict=True))
    ]
    reasons = "".join(f"<li>{escape(line)}</li>" for line in explanations(rows))
    newline = "\n"
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
<p>{escape(origins(rows))}</p>
<p>{escape(f"The same in all runs: {common}" if common else "")}</p>
<main>
<div class="table">
<div class="wide">
<table>
<thead><tr><th{_class("run")}>run</th>{head}</tr></thead>
<tbody>
{newline.join(lines)}
</tbody>
</table>
</div>
<ul>{reasons}</ul>
<p>{escape(NOTE)}</p>
</div>
<div>
{newline.join(_figure(png, CAPTIONS[file.partition(".")[0]]) for file, png in figures.items())}
</div>
</main>
<h2>Runs</h2>
<ul>{"".join(commands)}</ul>
</body>
</html>
"""


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


def _class(title: str, text: str = MISSING) -> str:
    """Returns the class of a cell: a column of words, and good or bad, which colour it."""
    classes = ["word"] if title in ("run", *WORDS) else []
    classes += ["name"] if title in ("run", "compared with") else []
    if title == "curve" and text not in (MISSING, REFERENCE):
        classes.append("good" if text == EQUAL else "bad")
    if title == "status" and text not in (MISSING, *FINE):
        classes.append("bad")
    return f' class="{" ".join(classes)}"' if classes else ""


def _figure(png: bytes, caption: str) -> str:
    image = f'<img src="data:image/png;base64,{base64.b64encode(png).decode()}" alt="{escape(caption)}">'
    return f"<figure>{image}<figcaption>{escape(caption)}</figcaption></figure>"
