"""Compares runs: the time and memory that each offload mode takes, and whether losses are the same.

    python scripts/compare.py multirun/2031-01-02/03-04-05          # a sweep
    python scripts/compare.py outputs multirun --out comparison     # all runs

    python scripts/compare.py SWEEP --out paper --format pdf --rows none 'layer_stream*' --order step_ms

Reads the directories that train.py writes, at any depth, and prints a table. Writes to --out (default: the first DIR)
compare.csv, compare.md, compare.tex (for the LaTeX package booktabs), the figures, and compare.html, one page with all
of it that needs no network. Runs that differ only in their seed make one row. At its end a sweep compares its runs in
the same way.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from training.runs import starting

if __name__ == "__main__":
    starting.refuse_foreign_python()
    starting.end_on_interrupt()

from training.comparison.report import compare
from training.errors import UserError
from training.runs import console
from training.runs.files import FIGURE_KINDS
from training.visible_text import visible


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path, metavar="DIR", help="holds runs or sweeps, at any depth")
    parser.add_argument("--out", type=Path, metavar="DIR", help="directory for the files [the first DIR]")
    parser.add_argument(
        "--format", choices=FIGURE_KINDS, default=FIGURE_KINDS[0], help="of the figures' files [%(default)s]"
    )
    parser.add_argument("--rows", nargs="+", metavar="NAME", help="rows to show, in this order; * is any text [all]")
    parser.add_argument("--order", metavar="COLUMN", help="sort by this column of compare.csv [offload=none first]")
    options = parser.parse_args()
    out = options.out or options.directories[0]
    try:
        compare(options.directories, out, kind=options.format, patterns=options.rows, order=options.order)
    except UserError as error:
        sys.exit(f"error: {visible(error)}")
    except OSError as error:
        sys.exit(f"error: {visible(error.filename or out)}: {error.strerror}; choose another place with --out DIR")


if __name__ == "__main__":
    starting.interrupt_as_usual()
    console.tolerate_failures()
    with starting.interrupt_in_one_line():
        main()
