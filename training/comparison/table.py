"""The comparison as a table: on the terminal, in CSV for programs, in Markdown for documents."""

import csv
import io
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TextIO

from training.comparison.rows import Row, Statistic
from training.visible_text import visible

MISSING = "\N{EN DASH}"
COMPARED_WITH = "compared with"
# Columns of words instead of numbers.
WORDS = ("curve", COMPARED_WITH, "seeds", "status")
# The characters that Markdown gives a meaning, GitHub's the dollar sign too; an underscore within a word has none.
MARKUP = re.compile(r"[\\`*|~$]|(?<![^\W_])_|_(?![^\W_])|(?<=\])\(")
# What LaTeX reads otherwise than it looks.
LATEX = str.maketrans(
    {character: f"\\{character}" for character in "&%$#_{}"}
    | {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "[": "{[}",
        "<": "$<$",
        ">": "$>$",
        "|": "$|$",
        "\N{PLUS-MINUS SIGN}": r"$\pm$",
        MISSING: "--",
    }
)
# Rows of which the same is said that are named; further ones are counted.
NAMED = 3
# Width of lines, in characters, if the output is not a terminal.
PLAIN_WIDTH = 160
# Characters between two columns.
PADDING = 2
NOTE = (
    "± is the standard deviation over the seeds. Ratios are to the resident run (offload=none) with the same settings."
    " The curve is equal if the losses, in training and in evaluations, are those of the resident run in every bit;"
    " else it is the largest relative difference. The floor is the largest of the step's FLOPs at the peak of the GPU"
    " and the bytes each way at the bandwidth of the bus. With several devices rates are those of all together, VRAM is"
    " that of the fullest, host memory that of all on one host, and copies and waits are those of the first. Columns"
    " that are zero or unknown in every row are left out."
)


@dataclass(frozen=True)
class Column:
    """A column of the table: one number of each row.

    Attributes:
        title: the heading in the printed table, with the unit; its length is the least width of the column.
        name: the heading in compare.csv.
        source: the key of a metric, or an attribute of Row.
        form: the format of the printed number, which is the mean times `scale`.
        exponent_from: the printed number from which on it has an exponent.
        has_spread: whether the number varies from seed to seed; ratios of means and counts of bytes do not.
    """

    title: str
    name: str
    source: str
    form: str
    scale: float = 1.0
    exponent_from: float = 1e12
    has_spread: bool = False

    def statistic(self, row: Row) -> Statistic | None:
        if hasattr(row, self.source):
            value = getattr(row, self.source)
            return None if value is None else Statistic(value)
        return row.statistics.get(self.source)

    def text(self, row: Row) -> str:
        """Returns mean and spread for people, or a dash if nothing was measured."""
        statistic = self.statistic(row)
        if statistic is None:
            return MISSING
        mean = self._format(statistic.mean)
        if statistic.spread is None or not self.has_spread:
            return mean
        spread = self._format(statistic.spread)
        # A spread that rounds to zero is left out.
        return f"{mean} ± {spread}" if any(digit in "123456789" for digit in spread) else mean

    def _format(self, value: float) -> str:
        scaled = value * self.scale
        return format(scaled, self.form if abs(scaled) < self.exponent_from else ".5g")


COLUMNS = (
    Column("devices", "devices", "devices", ",.0f"),
    Column("step ms", "step_ms", "perf/step_ms", ",.1f", has_spread=True),
    Column("to none", "ratio_to_none", "ratio", ".2f"),
    Column("to floor", "ratio_to_floor", "floor_ratio", ".2f"),
    Column("tokens/s", "tokens_per_s", "perf/tokens_per_s", ",.0f"),
    Column("images/s", "images_per_s", "perf/images_per_s", ",.4g"),
    Column("examples/s", "examples_per_s", "perf/examples_per_s", ",.4g"),
    Column("MFU %", "mfu", "perf/mfu", ".1f", scale=100.0),
    Column("VRAM GiB", "vram_peak_gib", "memory/vram_peak_gib", ".2f"),
    Column("locked GiB", "host_pinned_gib", "memory/host_pinned_gib", ".2f"),
    Column("RSS GiB", "rss_gib", "memory/rss_gib", ".2f"),
    Column("in GiB", "h2d_gib", "transfer/h2d_gib", ".3g"),
    Column("out GiB", "d2h_gib", "transfer/d2h_gib", ".3g"),
    Column("stall ms", "stall_ms", "transfer/stall_ms", ",.1f", has_spread=True),
    Column("opt wait ms", "optimizer_wait_ms", "optimizer/wait_ms", ",.1f", has_spread=True),
    Column("imbalance", "load_imbalance", "moe/load_imbalance", ".3g", has_spread=True),
    Column("dead %", "dead_experts", "moe/dead_experts", ".3g", scale=100.0, has_spread=True),
    Column("entropy", "router_entropy", "moe/router_entropy", ".3g", has_spread=True),
    Column("final loss", "final_loss", "train/final_loss", ".4f", exponent_from=1e4, has_spread=True),
    Column("eval loss", "eval_loss", "eval/final_loss", ".4f", exponent_from=1e4, has_spread=True),
    Column("accuracy %", "eval_accuracy", "eval/final_accuracy", ".1f", scale=100.0),
)
# Words of CSV, behind the numbers.
CSV_WORDS: dict[str, Callable[[Row], str]] = {
    "curve": lambda row: row.curve or "",
    "compared_with": lambda row: row.reference.name if row.reference else "",
    "seeds": lambda row: row.seeds,
    "status": lambda row: row.status,
    "why": lambda row: "; ".join(row.reasons),
    "departure": lambda row: row.departure or "",
    "notes": lambda row: "; ".join(row.notes),
    "directories": lambda row: ";".join(str(run.directory) for run in row.runs),
}


def cells(rows: Sequence[Row]) -> list[dict[str, str]]:
    """Returns the texts of each row by column title, without the columns that are empty or zero in all rows."""
    several = len({id(row.reference) for row in rows if row.reference}) > 1
    columns = [column for column in COLUMNS if any(s.mean != 0 for row in rows if (s := column.statistic(row)))]
    if all((row.devices or 1) == 1 for row in rows):
        columns = [column for column in columns if column.source != "devices"]
    texts = []
    for row in rows:
        values = {column.title: column.text(row) for column in columns} | {"curve": row.curve or MISSING}
        reference = {COMPARED_WITH: row.reference.name if row.reference else MISSING} if several else {}
        values |= reference | {"seeds": row.seeds or MISSING, "status": row.status}
        texts.append({title: visible(text) for title, text in values.items()})
    return texts


def explanations(rows: Sequence[Row]) -> list[str]:
    """Returns lines below the table: why runs did not finish, where and why losses depart, and the notes of runs.

    What is said of several rows is one line.
    """
    said: dict[str, list[str]] = {}
    for row in rows:
        texts = [*(f"{row.status}: {reason}" for reason in row.reasons), row.departure, *row.notes]
        for text in filter(None, texts):
            said.setdefault(text, []).append(row.name)
    more = {text: f" and {len(names) - NAMED} more" if names[NAMED:] else "" for text, names in said.items()}
    return [visible(f"{', '.join(names[:NAMED])}{more[text]}: {text}") for text, names in said.items()]


def print_tables(rows: Sequence[Row], title: str, *, stream: TextIO | None = None, width: int | None = None) -> None:
    """Prints the rows as one table, or as several tables if the terminal is too narrow for all columns."""
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


def to_csv(rows: Sequence[Row]) -> str:
    """Returns one line of plain numbers for each row; a cell is empty if nothing was measured."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    headings = []
    for column in COLUMNS:
        headings += [column.name, f"{column.name}_std"] if column.has_spread else [column.name]
    writer.writerow(["name", *headings, *CSV_WORDS])
    for row in rows:
        numbers: list[float | None] = []
        for column in COLUMNS:
            statistic = column.statistic(row)
            both = (statistic.mean, statistic.spread) if statistic else (None, None)
            numbers += both if column.has_spread else both[:1]
        writer.writerow([visible(row.name), *numbers, *(visible(word(row)) for word in CSV_WORDS.values())])
    return text.getvalue()


def to_markdown(rows: Sequence[Row], title: str, common: str) -> str:
    """Returns a table in GitHub's Markdown with a caption, and the explanations."""
    texts = [{"run": row.name, **text} for row, text in zip(rows, cells(rows), strict=True)]
    alignment = ("---" if column in ("run", *WORDS) else "--:" for column in texts[0])
    lines = [f"**{_markdown(title)}**", "", _markdown_line(texts[0]), _markdown_line(alignment)]
    lines += [_markdown_line(text.values()) for text in texts]
    lines += ["", *(f"- {_markdown(line)}" for line in explanations(rows))]
    lines += [""] if explanations(rows) else []
    lines += [_markdown(f"The same in all runs: {common}.") + "  " if common else "", NOTE, ""]
    return "\n".join(lines)


def to_latex(rows: Sequence[Row]) -> str:
    """Returns the table as a LaTeX tabular, for the package booktabs.

    A page of paper is narrow: words that are the same in all rows are left out, and so are the names of the references,
    whose rows are there.
    """
    found = cells(rows)
    alike = {word for word in WORDS if len({text.get(word) for text in found}) == 1} | {COMPARED_WITH}
    texts = [
        {"run": row.name, **{title: value for title, value in text.items() if title not in alike}}
        for row, text in zip(rows, found, strict=True)
    ]
    columns = "".join("l" if column in ("run", *WORDS) else "r" for column in texts[0])
    rows_of_cells = (texts[0], *(text.values() for text in texts))
    head, *lines = [" & ".join(cell.translate(LATEX) for cell in line) + r" \\" for line in rows_of_cells]
    begin = ["% \\usepackage{booktabs}", f"\\begin{{tabular}}{{{columns}}}", r"\toprule", head, r"\midrule"]
    return "\n".join([*begin, *lines, r"\bottomrule", r"\end{tabular}", ""])


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
