"""A comparison as people read it: on the terminal, and in files beside the runs."""

import os
from collections.abc import Sequence
from pathlib import Path

from training.comparison.rows import Row, build_rows
from training.comparison.runs import find_runs
from training.comparison.settings import all_settings, in_common
from training.comparison.table import print_tables, to_csv, to_markdown
from training.runs.files import (
    COMPARISON_CSV,
    COMPARISON_MARKDOWN,
    COMPARISON_PAGE,
    COMPARISON_PICTURES,
    partial_path,
)


def compare(directories: Sequence[Path], out: Path) -> list[Row]:
    """Compares the runs in and below `directories`: prints the table and writes table, figures and page to `out`.

    A file is there whole or, where something fails, as it was before.

    Raises:
        UserError: there is no run.
        OSError: `out` cannot be written.
    """
    runs = find_runs(directories)
    rows = build_rows(runs)
    title = " ".join(map(str, directories))
    common = " ".join(in_common(runs, all_settings(runs)))
    # First what is quick and cannot fail.
    print(flush=True)
    print_tables(rows, title)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / COMPARISON_CSV, to_csv(rows).encode())
    write_whole(out / COMPARISON_MARKDOWN, to_markdown(rows, title, common).encode())
    # Late: they import matplotlib, which takes a second.
    from training.comparison.page import draw, page

    figures = draw(rows)
    for figure in figures:
        write_whole(out / figure.file, figure.png)
    for file in {*COMPARISON_PICTURES} - {figure.file for figure in figures}:
        # What an earlier comparison drew is no picture of this one.
        (out / file).unlink(missing_ok=True)
    write_whole(out / COMPARISON_PAGE, page(rows, figures, title, common).encode())
    print(f"page    {out / COMPARISON_PAGE}")
    print(
        f"files   {', '.join([COMPARISON_CSV, COMPARISON_MARKDOWN, *(figure.file for figure in figures)])}", flush=True
    )
    return rows


def write_whole(path: Path, content: bytes) -> None:
    """Writes the file aside and renames it, so that a reader sees the old one or the new one."""
    partial = partial_path(path)
    try:
        partial.write_bytes(content)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
