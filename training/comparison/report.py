"""Compares runs and reports the result: on the terminal, and in files beside the runs."""

import math
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from training.comparison.page import to_html
from training.comparison.rows import Row, build_rows
from training.comparison.runs import find_runs
from training.comparison.settings import in_common
from training.comparison.table import COLUMNS, print_tables, to_csv, to_latex, to_markdown
from training.errors import UserError
from training.runs.files import (
    COMPARE_CSV_FILE,
    COMPARE_LATEX_FILE,
    COMPARE_MARKDOWN_FILE,
    COMPARE_PAGE_FILE,
    FIGURE_KINDS,
    FIGURES,
    write_whole,
)
from training.visible_text import visible


def compare(
    directories: Sequence[Path],
    out: Path,
    *,
    kind: str = FIGURE_KINDS[0],
    patterns: Sequence[str] | None = None,
    order: str | None = None,
) -> list[Row]:
    """Compares the runs in and below `directories`: prints the table, and writes table, figures and page to `out`.

    Each file is replaced as a whole, or stays as it was. Figures beside the page have the format `kind`, one of
    FIGURE_KINDS. `patterns` select rows by name, with * for any text (None: all rows). Rows have the order of the
    patterns, or are sorted by the column `order` of compare.csv. Returns the selected rows. Raises UserError if there
    is no run, no matching row or no such column, and OSError if `out` cannot be written.
    """
    runs = find_runs(directories)
    rows = chosen(build_rows(runs), patterns, order)
    runs = [run for row in rows for run in row.runs]
    title = " ".join(map(str, directories))
    common = " ".join(in_common(runs))
    # The table comes first: it is quick.
    print(flush=True)
    print_tables(rows, title)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / COMPARE_CSV_FILE, to_csv(rows).encode())
    write_whole(out / COMPARE_MARKDOWN_FILE, to_markdown(rows, title, common).encode())
    write_whole(out / COMPARE_LATEX_FILE, to_latex(rows).encode())
    # Imported late, because matplotlib takes a second to import.
    from training.comparison.figures import render_figures

    shown = render_figures(rows)
    figures = shown if kind == FIGURE_KINDS[0] else render_figures(rows, kind)
    for file in (f"{name}.{suffix}" for name in FIGURES for suffix in FIGURE_KINDS):
        if file in figures:
            write_whole(out / file, figures[file])
        else:
            # A figure of an earlier comparison does not belong to this one.
            (out / file).unlink(missing_ok=True)
    write_whole(out / COMPARE_PAGE_FILE, to_html(rows, shown, title, common).encode())
    print(f"page    {visible(out / COMPARE_PAGE_FILE)}")
    files = [COMPARE_CSV_FILE, COMPARE_MARKDOWN_FILE, COMPARE_LATEX_FILE, *figures]
    print(f"files   {', '.join(files)}", flush=True)
    return rows


def chosen(rows: Sequence[Row], patterns: Sequence[str] | None, order: str | None) -> list[Row]:
    """Returns the rows whose names match `patterns`, in their order, or sorted by the column `order` of compare.csv."""
    found = list(rows)
    if patterns is not None:
        found = []
        for pattern in patterns:
            matches = [row for row in rows if row.name == pattern or fnmatchcase(row.name, pattern)]
            if not matches:
                raise UserError(f"--rows {pattern}: no such row; choose of: {', '.join(row.name for row in rows)}")
            found += [row for row in matches if row not in found]
    if order is not None:
        by_name = {column.name: column for column in COLUMNS}
        if order not in by_name:
            raise UserError(f"--order {order}: no such column; choose one of {', '.join(by_name)}")
        values = {id(row): by_name[order].statistic(row) for row in found}
        found.sort(key=lambda row: math.inf if (value := values[id(row)]) is None else value.mean)
    return found
