"""The comparison as text: tables on the terminal, CSV for programs, Markdown for documents."""

import csv
import io
import re
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TextIO

from training.comparison.columns import COLUMNS, MISSING, NOTE, Column, curve_text
from training.comparison.rows import Row
from training.visible_text import visible

COMPARED_WITH = "compared with"
# Columns of words instead of numbers.
WORDS = ("curve", COMPARED_WITH, "seeds", "status")
# The characters that Markdown gives a meaning, GitHub's the dollar sign too; an underscore within a word has none.
MARKUP = re.compile(r"[\\`*|~$]|(?<![^\W_])_|_(?![^\W_])|(?<=\])\(")
# With these a spreadsheet begins a formula, in some languages with the wide forms too; `visible` leaves no line break.
FORMULA_STARTS = "=+-@\uff1d\uff0b\uff0d\uff20"
# Width of lines, in characters, if the output is not a terminal.
PLAIN_WIDTH = 160
# Characters between two columns.
PADDING = 2


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns each row's texts for people, by the titles of their columns, as `visible` makes them.

    Columns that are zero or unknown in every row are left out. If there are several resident runs, one column names
    the run that each row is compared with.
    """
    several = len({id(row.reference) for row in rows if row.reference}) > 1
    columns = [column for column in COLUMNS if any(is_measured(column, row) for row in rows)]
    texts = []
    for row in rows:
        values = {column.title: column.text(row) for column in columns} | {"curve": curve_text(row)}
        reference = {COMPARED_WITH: row.reference.name if row.reference else MISSING} if several else {}
        values |= reference | {"seeds": row.seeds or MISSING, "status": row.status}
        texts.append({title: visible(text) for title, text in values.items()})
    return texts


def is_measured(column: Column, row: Row) -> bool:
    """Tells whether `row` has a value in `column` that is not zero."""
    statistic = column.statistic(row)
    return statistic is not None and statistic.mean != 0


def print_tables(rows: Sequence[Row], title: str, *, stream: TextIO | None = None, width: int | None = None) -> None:
    """Prints the rows as one table, or as several tables if the terminal is too narrow for all columns.

    The reasons why runs did not finish follow below, each in one piece, which a narrow column would break up.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    stream = stream or sys.stdout
    # Without markup, because names may contain square brackets, which rich would read as markup.
    console = Console(file=stream, markup=False, emoji=False, highlight=False, width=width)
    if width is None and not stream.isatty():
        console.width = PLAIN_WIDTH
    texts = cells(rows)
    widths = {column: max(_header_width(column), *(len(text[column]) for text in texts)) for column in texts[0]}
    names = [visible(row.name) for row in rows]
    name_width = min(max(map(len, names)), console.width // 3)
    if COMPARED_WITH in widths:
        widths[COMPARED_WITH] = min(widths[COMPARED_WITH], max(name_width, _header_width(COMPARED_WITH)))
    console.print(visible(title), style="bold", soft_wrap=True)
    for columns in _parts(widths, console.width - name_width - PADDING):
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        table.add_column("", style="cyan", width=name_width, overflow="fold")
        for column in columns:
            justify = "left" if column in WORDS else "right"
            table.add_column(column, justify=justify, width=widths[column], overflow="fold")
        for name, text in zip(names, texts, strict=True):
            table.add_row(name, *(text[column] for column in columns))
        console.print(table)
        console.print()
    for line in explanations(rows):
        console.print(line, soft_wrap=True)


def explanations(rows: Sequence[Row]) -> list[str]:
    """Returns a line for each reason why a run did not finish, for what is wrong with the files of a run, for where and
    why a curve departs from the resident run's, and for each note of a run.
    """
    lines = []
    for row in rows:
        lines += [f"{row.name}: {row.status}: {reason}" for reason in row.reasons]
        lines += [f"{row.name}: {row.departure}"] if row.departure else []
        lines += [f"{row.name}: {note}" for note in row.notes]
    return [visible(line) for line in lines]


def to_csv(rows: Sequence[Row]) -> str:
    """Returns one line of plain numbers for each row; a cell is empty if nothing was measured.

    Text that a spreadsheet would run as a formula gets an apostrophe in front, and no text has a line break.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    headings = []
    for column in COLUMNS:
        headings += [column.name, f"{column.name}_std"] if column.has_spread else [column.name]
    words = ["curve", "compared_with", "seeds", "status", "why", "departure", "notes", "directories"]
    writer.writerow(["name", *headings, *words])
    for row in rows:
        numbers: list[float | None] = []
        for column in COLUMNS:
            statistic = column.statistic(row)
            numbers.append(statistic.mean if statistic else None)
            if column.has_spread:
                numbers.append(statistic.spread if statistic else None)
        writer.writerow(
            [
                _csv_text(row.name),
                *numbers,
                row.curve,
                _csv_text(row.reference.name if row.reference else None),
                _csv_text(row.seeds),
                _csv_text(row.status),
                _csv_text("; ".join(row.reasons)),
                _csv_text(row.departure),
                _csv_text("; ".join(row.notes)),
                _csv_text(";".join(str(run.directory) for run in row.runs)),
            ]
        )
    return text.getvalue()


def to_markdown(rows: Sequence[Row], title: str, common: str) -> str:
    """Returns a table in GitHub's Markdown with a caption, and the reasons why runs did not finish."""
    texts = [{"run": row.name, **text} for row, text in zip(rows, cells(rows), strict=True)]
    lines = [f"**{_markdown(title)}**", ""]
    alignment = ("---" if column in ("run", *WORDS) else "--:" for column in texts[0])
    lines += [_markdown_line(texts[0]), _markdown_line(alignment)]
    lines += [_markdown_line(text.values()) for text in texts]
    lines += ["", *(f"- {_markdown(line)}" for line in explanations(rows))]
    lines += [""] if explanations(rows) else []
    lines += [_markdown(f"The same in all runs: {common}.") + "  " if common else "", NOTE, ""]
    return "\n".join(lines)


def _header_width(title: str) -> int:
    # Titles may break between words.
    return max(len(word) for word in title.split())


def _parts(widths: dict[str, int], room: int) -> list[list[str]]:
    """Splits the columns, in their order, into as few parts as fit into `room` characters each."""
    parts: list[list[str]] = [[]]
    left = room
    for column, width in widths.items():
        if parts[-1] and left < width + PADDING:
            parts.append([])
            left = room
        parts[-1].append(column)
        left -= width + PADDING
    return parts


def _markdown_line(texts: Iterable[str]) -> str:
    return f"| {' | '.join(map(_markdown, texts))} |"


def _markdown(text: str) -> str:
    """Escapes the text, so that Markdown shows it as it is: no cell ends, emphasis, code, links or tags in it."""
    escaped = MARKUP.sub(r"\\\g<0>", visible(" ".join(text.split())))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")


def _csv_text(text: str | None) -> str | None:
    """Returns text that a spreadsheet shows as text, also if it begins like a formula."""
    text = text and visible(text)
    if not text or text[0] not in FORMULA_STARTS:
        return text
    with suppress(ValueError):
        float(text)
        return text
    return f"'{text}"
