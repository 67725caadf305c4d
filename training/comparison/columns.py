"""The columns of a comparison: their titles, their values, and how values are written for people."""

from collections.abc import Callable
from dataclasses import dataclass

from training.comparison.rows import Row, Statistic

MISSING = "\N{EN DASH}"


@dataclass(frozen=True)
class Column:
    """One value of each row."""

    title: str
    """for people, with its unit; short, because it sets the width of the column"""
    name: str
    """in files, where values are plain numbers"""
    meaning: str
    statistic: Callable[[Row], Statistic | None]
    form: str
    """format specification of the mean"""
    scale: float = 1.0
    """factor from the value in files to the one for people"""
    exponent_from: float = 1e12
    """values this large are written with an exponent, so that the column stays narrow"""

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

    @property
    def has_spread(self) -> bool:
        """True if the value varies from seed to seed; ratios of means and counts of bytes do not."""
        return self.name in ("step_ms", "stall_ms", "optimizer_wait_ms", "final_loss", "eval_loss")


def _measured(key: str) -> Callable[[Row], Statistic | None]:
    return lambda row: row.statistics.get(key)


def _derived(attribute: str) -> Callable[[Row], Statistic | None]:
    def statistic(row: Row) -> Statistic | None:
        value = getattr(row, attribute)
        return None if value is None else Statistic(value)

    return statistic


COLUMNS = (
    Column(
        "devices",
        "devices",
        "devices that share each step: rates are those of all together, VRAM is that of the fullest, host memory that"
        " of all on one host, and copies and waits are those of the first",
        _measured("devices"),
        ",.0f",
    ),
    Column("step ms", "step_ms", "time of one step", _measured("perf/step_ms"), ",.1f"),
    Column("to none", "ratio_to_none", "step time divided by that of its resident run", _derived("ratio"), ".2f"),
    Column(
        "to floor",
        "ratio_to_floor",
        "step time divided by the largest of: the FLOPs of the step at the GPU's peak, the bytes in and the bytes out"
        " at the bandwidth of the bus; not known on the CPU",
        _derived("floor_ratio"),
        ".2f",
    ),
    Column("tokens/s", "tokens_per_s", "tokens trained per second", _measured("perf/tokens_per_s"), ",.0f"),
    Column("images/s", "images_per_s", "images trained on per second", _measured("perf/images_per_s"), ",.4g"),
    Column("examples/s", "examples_per_s", "examples trained on per second", _measured("perf/examples_per_s"), ",.4g"),
    Column("MFU %", "mfu", "model FLOP/s as a share of the device's peak", _measured("perf/mfu"), ".1f", scale=100.0),
    Column("VRAM GiB", "vram_peak_gib", "peak of live tensors on the GPU", _measured("memory/vram_peak_gib"), ".2f"),
    Column("locked GiB", "host_pinned_gib", "page-locked host memory", _measured("memory/host_pinned_gib"), ".2f"),
    Column("RSS GiB", "rss_gib", "resident host memory of the process", _measured("memory/rss_gib"), ".2f"),
    Column("in GiB", "h2d_gib", "copied from host to device per step", _measured("transfer/h2d_gib"), ".3g"),
    Column("out GiB", "d2h_gib", "copied from device to host per step", _measured("transfer/d2h_gib"), ".3g"),
    Column("stall ms", "stall_ms", "compute waiting for copies, per step", _measured("transfer/stall_ms"), ",.1f"),
    Column(
        "opt wait ms",
        "optimizer_wait_ms",
        "waiting for the optimizer's updates on the host, per step",
        _measured("optimizer/wait_ms"),
        ",.1f",
    ),
    Column(
        "final loss",
        "final_loss",
        "training loss of the last logged step",
        _measured("train/final_loss"),
        ".4f",
        exponent_from=1e4,
    ),
    Column(
        "eval loss",
        "eval_loss",
        "held-out loss of the last evaluation",
        _measured("eval/final_loss"),
        ".4f",
        exponent_from=1e4,
    ),
    Column(
        "accuracy %",
        "eval_accuracy",
        "held-out examples classified rightly in the last evaluation",
        _measured("eval/final_accuracy"),
        ".1f",
        scale=100.0,
    ),
)


def curve_text(row: Row) -> str:
    """Returns how the row's losses compare with the resident run's, or a dash if they cannot be compared."""
    return row.curve or MISSING


NOTE = (
    "± is the standard deviation over the seeds. Ratios are to the resident run (offload=none) with the same settings."
    " The curve is equal if the losses, in training and in evaluations, are those of the resident run in every bit;"
    " else it is the largest relative difference. The floor is the largest of the step's FLOPs at the peak of the GPU"
    " and the bytes each way at the bandwidth of the bus. Columns that are zero or unknown in every row are left out."
)
