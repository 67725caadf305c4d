"""Compares runs and reports the result: on the terminal, and in files beside the runs."""

from collections.abc import Sequence
from pathlib import Path

from training.comparison.page import to_html
from training.comparison.rows import Row, build_rows
from training.comparison.runs import find_runs
from training.comparison.settings import in_common
from training.comparison.table import print_tables, to_csv, to_markdown
from training.runs.files import COMPARE_CSV_FILE, COMPARE_MARKDOWN_FILE, COMPARE_PAGE_FILE, FIGURE_FILES, write_whole
from training.visible_text import visible


def compare(directories: Sequence[Path], out: Path) -> list[Row]:
    """Compares the runs in and below `directories`: prints the table, and writes table, figures and page to `out`.

    Each file is replaced as a whole; where writing fails, it stays as it was. Returns the rows of the table.

    Raises:
        UserError: there is no run in `directories`.
        OSError: `out` cannot be written.
    """
    runs = find_runs(directories)
    rows = build_rows(runs)
    title = " ".join(map(str, directories))
    common = " ".join(in_common(runs))
    # The table comes first: it is quick.
    print(flush=True)
    print_tables(rows, title)
    out.mkdir(parents=True, exist_ok=True)
    write_whole(out / COMPARE_CSV_FILE, to_csv(rows).encode())
    write_whole(out / COMPARE_MARKDOWN_FILE, to_markdown(rows, title, common).encode())
    # Imported late, because matplotlib takes a second to import.
    from training.comparison.figures import render_figures

    figures = render_figures(rows)
    for file in FIGURE_FILES:
        if file in figures:
            write_whole(out / file, figures[file])
        else:
            # A figure of an earlier comparison does not belong to this one.
            (out / file).unlink(missing_ok=True)
    write_whole(out / COMPARE_PAGE_FILE, to_html(rows, figures, title, common).encode())
    print(f"page    {visible(out / COMPARE_PAGE_FILE)}")
    print(f"files   {', '.join([COMPARE_CSV_FILE, COMPARE_MARKDOWN_FILE, *figures])}", flush=True)
    return rows
