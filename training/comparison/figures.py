"""The pictures of a comparison: time against memory, where a step's time goes, the losses on top of each other."""

from collections.abc import Sequence
from dataclasses import dataclass

from training.comparison.canvas import png, style
from training.comparison.loss_figure import loss_figure
from training.comparison.memory_figure import memory_figure, memory_key
from training.comparison.rows import Row, losses
from training.comparison.time_figure import time_figure

FIGURES = ("compare_memory.png", "compare_time.png", "compare_loss.png")


@dataclass(frozen=True)
class Picture:
    """A PNG file, and in words what it shows."""

    file: str
    caption: str
    png: bytes


def draw(rows: Sequence[Row]) -> list[Picture]:
    """The pictures for which there are figures: of the rows with a run that finished, and the losses of all."""
    timed = [row for row in rows if row.finished and row.mean("perf/step_ms")]
    # Beside runs on a GPU, one on the CPU would seem to need no memory.
    placed = [row for row in timed if row.mean(memory_key(timed))]
    # A plan knows no waits.
    waited = [row for row in timed if "transfer/stall_ms" in row.figures]
    curved = [row for row in rows if any(losses(run.records) for run in row.measured)]
    wanted = (
        (memory_figure, placed, _memory_caption(placed)),
        (time_figure, waited, "The time of a step: computing, waiting for copies, waiting for the optimizer."),
        (loss_figure, curved, "Training loss. Runs whose losses are equal in every bit share a line."),
    )
    with style():
        return [
            Picture(file, caption, png(figure(shown)))
            for file, (figure, shown, caption) in zip(FIGURES, wanted, strict=True)
            if shown
        ]


def _memory_caption(rows: Sequence[Row]) -> str:
    what = "Planned step time" if all(row.planned for row in rows) else "Step time"
    beside = "" if all(row.fits for row in rows) else " Plans that do not fit are off it."
    return f"{what} against peak memory. The line joins the runs that no other beats in both.{beside}"
