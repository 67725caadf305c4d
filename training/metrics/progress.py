"""The output of a run on the terminal: what it prepares, its plan, its progress and its summary.

A terminal gets a line for what is prepared, and a bar, which are redrawn in place; a file or a pipe gets plain lines,
one for each logged step, without control characters. Everything goes to standard output.
"""

import logging
import shlex
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from training.metric_names import METRIC_KEYS, PLANNED, SUMMARY_KEYS, UNITS
from training.runs.files import METRICS_FILE, SUMMARY_FILE, WANDB_FOLDER
from training.visible_text import visible

# The root, and those that conf/hydra/job_logging/train.yaml gives handlers.
LOGGERS = (None, "training", "models", "offload")


def _lines_above_bars() -> AbstractContextManager[None]:
    """Has what is logged printed above a bar, of the loggers too that have handlers of their own."""
    return logging_redirect_tqdm([logging.getLogger(name) for name in LOGGERS])


@contextmanager
def phase(text: str, *, stream: TextIO | None = None) -> Iterator[None]:
    """Shows on a terminal what the run is busy with, until the block ends, which prints nothing but logs."""
    stream = stream or sys.stdout
    if not stream.isatty():
        yield
        return
    with tqdm(desc=text, file=stream, bar_format="{desc} ...", dynamic_ncols=True, leave=False), _lines_above_bars():
        yield


class Progress:
    """Shows the progress of a run over `total_steps` steps on `stream`; a resumed one has done `initial_step`."""

    def __init__(self, total_steps: int, *, initial_step: int = 0, stream: TextIO | None = None):
        self._total_steps, self._initial_step = total_steps, initial_step
        self._stream = stream or sys.stdout
        self._started_at = time.monotonic()
        self._bar: tqdm | None = None
        self._redirect = ExitStack()
        if self._stream.isatty():
            form = "training {n_fmt}/{total_fmt} |{bar}| ETA {remaining}{postfix}"
            self._bar = tqdm(
                total=total_steps,
                initial=initial_step,
                bar_format=form,
                file=self._stream,
                dynamic_ncols=True,
            )
            # Log lines go above the bar rather than through it.
            self._redirect.enter_context(_lines_above_bars())

    def update(self, step: int, record: Mapping[str, Any] | None = None) -> None:
        """Shows that `step` steps are done, and the values of `record`, if one is given."""
        if self._bar is not None:
            if record:
                self._bar.set_postfix_str("  ".join(_headline(record)), refresh=False)
            self._bar.update(step - self._bar.n)
        elif record:
            width = len(str(self._total_steps))
            parts = [f"step {step:{width}}/{self._total_steps}", *_headline(record), f"ETA {self._eta(step)}"]
            print("  ".join(parts), file=self._stream, flush=True)

    def note(self, text: str) -> None:
        """Prints `text`, whatever is in it, as one line above the bar."""
        tqdm.write(visible(text), file=self._stream)
        self._stream.flush()

    def close(self) -> None:
        """Leaves the last state on the screen; a second call does nothing."""
        if self._bar is not None:
            self._bar.close()
        self._redirect.close()

    def _eta(self, step: int) -> str:
        done = step - self._initial_step
        if not done:
            return "?"
        seconds = (time.monotonic() - self._started_at) / done * (self._total_steps - step)
        return tqdm.format_interval(seconds)


def print_brief(plan: Mapping[str, str], title: str, *, stream: TextIO | None = None) -> None:
    """Prints `plan` at the start of a run: a line for each entry, notes cut off at its end."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="cyan", no_wrap=True)
    table.add_column()
    for name, value in plan.items():
        is_note = name.startswith("note")
        table.add_row(visible(name), Text(visible(value), no_wrap=is_note, overflow="ellipsis" if is_note else "fold"))
    console = _console(stream)
    console.print(f"{visible(title)} (plan=true prints all of it)", style="bold", highlight=False)
    console.print(table)


def print_plan(plan: Mapping[str, str], title: str = "Plan", *, stream: TextIO | None = None) -> None:
    """Prints `plan` as a table of two columns, one row for each entry."""
    table = _table(visible(title))
    table.show_header = False
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in plan.items():
        table.add_row(visible(name), visible(value))
    _console(stream).print(table)


def print_summary(summary: Mapping[str, Any], run_dir: Path, *, stream: TextIO | None = None) -> None:
    """Prints the summary of a run: each metric that is not zero, with its planned value, then where the files are."""
    table = _table("Summary")
    table.add_column("metric", style="cyan", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("unit")
    planned = {key: summary[PLANNED + key] for key in METRIC_KEYS if PLANNED + key in summary}
    if planned:
        table.add_column("planned", justify="right", no_wrap=True)
        table.add_column("ratio", justify="right", no_wrap=True)
    for key, metric in {**SUMMARY_KEYS, **METRIC_KEYS}.items():
        if key in summary and (summary[key] or planned.get(key) or key == "steps"):
            beside = ()
            if key in planned:
                ratio = f"{summary[key] / planned[key]:.2f}" if planned[key] else ""
                beside = format_value(planned[key]), ratio
            unit = ", ".join(filter(None, (metric.unit, metric.summary)))
            table.add_row(key, format_value(summary[key]), unit, *beside)
    console = _console(stream)
    console.print(table)
    status, reason = summary.get("status", "ok"), summary.get("reason")
    # Never wrapped, so that a path can be copied.
    lines = [f"run {status}{f': {reason}' if reason else ''}", f"files   {run_dir}"]
    lines.append(f"metrics {METRICS_FILE} (a line for each logged step), {SUMMARY_FILE}")
    if (run_dir / WANDB_FOLDER).is_dir():
        lines.append(f"charts  wandb leet {shlex.quote(str(run_dir / WANDB_FOLDER))}")
    for line in lines:
        console.print(visible(line), highlight=False, soft_wrap=True)


def format_value(value: Any) -> str:
    """Formats a value for people: thousands separated, at most four significant digits."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _headline(record: Mapping[str, Any]) -> list[str]:
    """Returns losses, speed and memory of a logged step, as far as it has them: about 60 characters."""
    parts = []
    if "train/loss" in record:
        parts.append(f"loss {record['train/loss']:.4f}")
    if "train/reward_margin" in record:
        parts.append(f"margin {record['train/reward_margin']:.3f} ({record['train/reward_accuracy']:.0%} right)")
    if "eval/loss" in record:
        parts.append(f"eval loss {record['eval/loss']:.4f}")
    for unit in UNITS:
        if speed := record.get(f"perf/{unit}_per_s"):
            parts.append(f"{tqdm.format_sizeof(speed)} {unit}/s")
    if vram_gib := record.get("memory/vram_peak_gib"):
        parts.append(f"VRAM {vram_gib:.2f} GiB")
    elif rss_gib := record.get("memory/rss_gib"):
        parts.append(f"RSS {rss_gib:.2f} GiB")
    return parts


def _table(title: str) -> Table:
    return Table(title=title, box=box.ROUNDED, title_justify="left", title_style="bold")


def _console(stream: TextIO | None) -> Console:
    stream = stream or sys.stdout
    # A file or a pipe has no width, and text that is cut off there is lost. Names may have square brackets, which are
    # rich's markup, and colons, which are its emoji.
    return Console(file=stream, width=None if stream.isatty() else 120, markup=False, emoji=False)
