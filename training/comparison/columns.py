"""The columns of a comparison: what each is called, what it holds, and how a figure is written for people."""

from collections.abc import Callable
from dataclasses import dataclass

from training.comparison.rows import Figure, Row

MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """One figure of a row."""

    title: str
    """for people, with its unit; as short as the column is narrow"""
    name: str
    """in files, where a figure is a plain number"""
    meaning: str
    figure: Callable[[Row], Figure | None]
    form: str
    """format specification of the mean"""
    scale: float = 1.0
    """by which people's figure is larger than the file's"""
    exponent_from: float = 1e12
    """from where on a figure is written with its exponent, so that its column stays narrow"""

    def text(self, row: Row) -> str:
        """Mean and spread for people; a dash where nothing was measured."""
        figure = self.figure(row)
        if figure is None:
            return MISSING
        mean = self._written(figure.mean)
        if figure.spread is None or not self.spreads:
            return mean
        spread = self._written(figure.spread)
        # A spread that rounds to nothing is none.
        return f"{mean} ± {spread}" if any(digit in "123456789" for digit in spread) else mean

    def _written(self, value: float) -> str:
        scaled = value * self.scale
        return format(scaled, self.form if abs(scaled) < self.exponent_from else ".5g")

    @property
    def spreads(self) -> bool:
        """Whether the figure varies from seed to seed, where ratios of means and counts of bytes do not."""
        return self.name in ("step_ms", "stall_ms", "optimizer_wait_ms", "final_loss")


def _measured(key: str) -> Callable[[Row], Figure | None]:
    return lambda row: row.figures.get(key)


def _derived(attribute: str) -> Callable[[Row], Figure | None]:
    def figure(row: Row) -> Figure | None:
        value = getattr(row, attribute)
        return None if value is None else Figure(value)

    return figure


COLUMNS = (
    Column("step ms", "step_ms", "time of one step", _measured("perf/step_ms"), ",.1f"),
    Column("to none", "ratio_to_none", "step time over that of its resident run", _derived("ratio"), ".2f"),
    Column(
        "to floor",
        "ratio_to_floor",
        "step time over the largest of: the resident step, bytes in and bytes out over the measured bandwidth, the"
        " planned update on the host; of a plan, over the planned floor",
        _derived("floor_ratio"),
        ".2f",
    ),
    Column("tokens/s", "tokens_per_s", "tokens trained in a second", _measured("perf/tokens_per_s"), ",.0f"),
    Column("MFU %", "mfu", "model FLOPs over the device's peak", _measured("perf/mfu"), ".1f", scale=100.0),
    Column("VRAM GiB", "vram_peak_gib", "most live tensors on the GPU", _measured("memory/vram_peak_gib"), ".2f"),
    Column("locked GiB", "host_pinned_gib", "page-locked host memory", _measured("memory/host_pinned_gib"), ".2f"),
    Column("RSS GiB", "rss_gib", "resident host memory of the process", _measured("memory/rss_gib"), ".2f"),
    Column("in GiB", "h2d_gib", "copied from host to device in a step", _measured("transfer/h2d_gib"), ".3g"),
    Column("out GiB", "d2h_gib", "copied from device to host in a step", _measured("transfer/d2h_gib"), ".3g"),
    Column("stall ms", "stall_ms", "compute waiting for copies in a step", _measured("transfer/stall_ms"), ",.1f"),
    Column(
        "opt wait ms",
        "optimizer_wait_ms",
        "a step waiting for updates made beside the device",
        _measured("optimizer/wait_ms"),
        ",.1f",
    ),
    Column(
        "final loss",
        "final_loss",
        "loss of the last logged step",
        _measured("train/final_loss"),
        ".4f",
        exponent_from=1e4,
    ),
)


def curve_text(row: Row) -> str:
    return row.curve or MISSING


NOTE = (
    "± is the standard deviation over the seeds. Ratios are to the resident run (offload=none) with the same settings;"
    " curve says whether the losses are its own bit for bit, else how far they are apart at most, relatively."
    " The floor is the largest of the resident step, the bytes each way over the measured bandwidth and the planned"
    " update on the host; that of a plan, or where there is no resident run, is planned as a whole."
)
