"""The comparison as text: tables on the terminal, CSV for programs, Markdown for an issue or a draft."""

import csv
import io
import re
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import TextIO

from training.comparison.columns import COLUMNS, MISSING, NOTE, curve_text
from training.comparison.rows import Row

COMPARED_WITH = "compared with"
# Columns that hold no figures.
WORDS = ("curve", COMPARED_WITH, "seeds", "status")
# What Markdown reads as more than itself; an underscore within a word is none.
MARKUP = re.compile(r"[\\`*|~]|(?<![^\W_])_|_(?![^\W_])|(?<=\])\(")
# Without a terminal nothing tells how wide lines may be.
PLAIN_WIDTH = 160
# Between two columns.
PADDING = 2


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """The texts of each row for people, by the titles of their columns.

    Which resident run a row is compared with is said where there are several.
    """
    several = len({id(row.reference) for row in rows if row.reference}) > 1
    texts = []
    for row in rows:
        figures = {column.title: column.text(row) for column in COLUMNS} | {"curve": curve_text(row)}
        reference = {COMPARED_WITH: row.reference.name if row.reference else MISSING} if several else {}
        texts.append(figures | reference | {"seeds": row.seeds or MISSING, "status": row.status})
    return texts


def print_tables(rows: Sequence[Row], title: str, *, stream: TextIO | None = None, width: int | None = None) -> None:
    """Prints the rows as one table, or as several below each other where the terminal is too narrow for all columns.

    Why runs did not finish stands below, whole, because a column would break it to pieces.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    stream = stream or sys.stdout
    # Names may hold square brackets, which rich would take for its markup.
    console = Console(file=stream, markup=False, emoji=False, highlight=False, width=width)
    if width is None and not stream.isatty():
        console.width = PLAIN_WIDTH
    texts = cells(rows)
    widths = {column: max(_header_width(column), *(len(text[column]) for text in texts)) for column in texts[0]}
    name_width = min(max(len(row.name) for row in rows), console.width // 3)
    if COMPARED_WITH in widths:
        widths[COMPARED_WITH] = min(widths[COMPARED_WITH], max(name_width, _header_width(COMPARED_WITH)))
    console.print(title, style="bold", soft_wrap=True)
    for columns in _parts(widths, console.width - name_width - PADDING):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", style="cyan", width=name_width, overflow="fold")
        for column in columns:
            justify = "left" if column in WORDS else "right"
            table.add_column(column, justify=justify, width=widths[column], overflow="fold")
        for row, text in zip(rows, texts, strict=True):
            table.add_row(row.name, *(text[column] for column in columns))
        console.print(table)
        console.print()
    for line in explanations(rows):
        console.print(line, soft_wrap=True)


def explanations(rows: Sequence[Row]) -> list[str]:
    """A line for each reason why a run did not finish."""
    return [f"{row.name}: {row.status}: {reason}" for row in rows for reason in row.reasons]


def to_csv(rows: Sequence[Row]) -> str:
    """Plain numbers, one line a row; a cell is empty where nothing was measured.

    Text that a spreadsheet would run as a formula has an apostrophe before it.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    figures = [heading for column in COLUMNS for heading in (column.name, f"{column.name}_std")[: 1 + column.spreads]]
    writer.writerow(["name", *figures, "curve", "compared_with", "seeds", "status", "why", "directories"])
    for row in rows:
        numbers: list[float | None] = []
        for column in COLUMNS:
            figure = column.figure(row)
            numbers.append(figure.mean if figure else None)
            if column.spreads:
                numbers.append(figure.spread if figure else None)
        writer.writerow(
            [
                _csv_text(row.name),
                *numbers,
                row.curve,
                _csv_text(row.reference.name if row.reference else None),
                _csv_text(row.seeds),
                _csv_text(row.status),
                _csv_text("; ".join(row.reasons)),
                _csv_text(";".join(str(run.directory) for run in row.runs)),
            ]
        )
    return text.getvalue()


def to_markdown(rows: Sequence[Row], title: str, common: str) -> str:
    """A table in the dialect of GitHub with a caption, and the reasons why runs did not finish."""
    texts = [{"run": row.name, **text} for row, text in zip(rows, cells(rows), strict=True)]
    lines = [f"**{_markdown(title)}**", ""]
    lines += [_markdown_line(texts[0]), _markdown_line("---" if c in ("run", *WORDS) else "--:" for c in texts[0])]
    lines += [_markdown_line(text.values()) for text in texts]
    lines += ["", *(f"- {_markdown(line)}" for line in explanations(rows))]
    lines += [""] if explanations(rows) else []
    lines += [_markdown(f"In all: {common}.") + "  " if common else "", NOTE, ""]
    return "\n".join(lines)


def _header_width(title: str) -> int:
    # Titles break between their words.
    return max(len(word) for word in title.split())


def _parts(widths: dict[str, int], room: int) -> list[list[str]]:
    """Columns in their order, in as many parts as it takes to fit each into `room` characters."""
    parts: list[list[str]] = [[]]
    left = room
    for column, width in widths.items():
        if parts[-1] and left < width + PADDING:
            parts.append([])
            left = room
        parts[-1].append(column)
        left -= width + PADDING
    return parts


def _markdown_line(texts: "Sequence[str] | object") -> str:
    return f"| {' | '.join(map(_markdown, texts))} |"


def _markdown(text: str) -> str:
    """The text as it is: nothing in it is a cell's end, emphasis, code, a link or a tag."""
    escaped = MARKUP.sub(r"\\\g<0>", " ".join(text.split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _csv_text(text: str | None) -> str | None:
    """Text that a spreadsheet takes for nothing else; it would run what begins as a formula does."""
    if not text or text[0] not in "=+-@\t\r":
        return text
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}"
