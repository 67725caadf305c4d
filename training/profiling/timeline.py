"""One training step as a timeline: what computes, what is copied in and out, and where compute stands still.

Read from the trace of torch's profiler (Chrome's trace event format, which https://ui.perfetto.dev opens too). Times of
the trace and of everything here are microseconds; of what people read, milliseconds.
"""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

STALL = "stall"
# From top to bottom, each with its colour: Wong's palette (2011), told apart by colour-blind eyes.
LANES = {
    "copy in": "#0072B2",
    "compute": "#009E73",
    "copy out": "#E69F00",
    "kernels beside": "#56B4E9",
    "host update": "#CC79A7",
    STALL: "#D55E00",
}
# Drawn also where they are empty; the others only if they have something to show.
ALWAYS = ("copy in", "compute", "copy out", STALL)
# Gaps between kernels shorter than this are the launch's, not a wait's.
STALL_US = 50.0
COPIES = {"Memcpy HtoD": "copy in", "Memcpy DtoH": "copy out"}
# Of the picture's axis.
PIXEL = 1 / 1300
# The prefixes of the engine's ranges (`offload.runtime.transfer.profiled`), and the range that torch opens around
# optimizer.step.
RANGES = {"copy in ": "copy in", "copy out ": "copy out", "update ": "host update", "Optimizer.step#": "host update"}

Times = list[tuple[float, float]]


@dataclass(frozen=True)
class Span:
    """Work of one lane, in microseconds of the trace's clock."""

    lane: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """The spans of a step by their start. `overlaps` is False for a CPU, which does one thing after another."""

    spans: tuple[Span, ...]
    overlaps: bool

    @property
    def start_us(self) -> float:
        return self.spans[0].start_us

    @property
    def end_us(self) -> float:
        return max(span.end_us for span in self.spans)

    def busy(self, lane: str, bridge_us: float = 0.0) -> Times:
        """When `lane` works: overlapping spans merged, and gaps of up to `bridge_us` closed."""
        return merged(((span.start_us, span.end_us) for span in self.spans if span.lane == lane), bridge_us)

    def stalls(self) -> Times:
        """The gaps of the compute lane between the first and the last work of any lane."""
        working = self.busy("compute", STALL_US)
        return [time for time in without([(self.start_us, self.end_us)], working) if time[1] - time[0] > STALL_US]

    def times(self, lane: str) -> Times:
        return self.stalls() if lane == STALL else self.busy(lane)

    def busy_ms(self) -> dict[str, float]:
        """How long each lane works, those that have nothing and need not be shown left out."""
        found = {lane: total_us(self.times(lane)) / 1e3 for lane in LANES}
        return {lane: ms for lane, ms in found.items() if ms or lane in ALWAYS}

    def summary(self) -> str:
        """One line: the length of the step, and the ms that each lane was busy."""
        parts = ", ".join(f"{lane} {ms:.1f}" for lane, ms in self.busy_ms().items())
        return f"step {(self.end_us - self.start_us) / 1e3:.1f} ms; busy ms: {parts}"


def read_timeline(path: Path) -> Timeline:
    """The timeline in a trace, gzip'd or not.

    Of a GPU the device's own work, by stream: kernels on the stream that computes, kernels on those that copy (norms
    and sums of gradients, updates of states that live there), copies by direction. Of a CPU, where copies run where
    they are called, the engine's ranges, and as compute the operations outside them.

    Raises ValueError for a trace without any work.
    """
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    events = [event for event in trace["traceEvents"] if "dur" in event and "cat" in event]
    ranges = [event for event in events if event["cat"] == "user_annotation"]
    overlaps = any(event["cat"] in ("kernel", "gpu_memcpy") for event in events)
    if overlaps:
        updates = [event for event in ranges if _lane_of_range(event) == "host update"]
        spans = [*_device_spans(events), *(_span("host update", event) for event in updates)]
    else:
        spans = list(_program_spans(events, ranges))
    if not spans:
        raise ValueError(f"{path}: the trace holds no work of the device")
    return Timeline(tuple(sorted(spans, key=lambda span: span.start_us)), overlaps)


def draw(timeline: Timeline, path: Path, title: str) -> None:
    """The Gantt chart of a step as a PNG file, 1600 pixels wide."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    busy_ms, length_ms = timeline.busy_ms(), (timeline.end_us - timeline.start_us) / 1e3
    figure, axes = pyplot.subplots(figsize=(12.3, 1.35 + 0.42 * len(busy_ms)))
    for row, lane in enumerate(busy_ms):
        times = timeline.stalls() if lane == STALL else timeline.busy(lane, bridge_us=5.0)
        # A short copy is to be seen; many short kernels are not to look like a long one.
        least_ms = 0.0 if lane == "compute" else length_ms * PIXEL
        bars = [((start - timeline.start_us) / 1e3, max((end - start) / 1e3, least_ms)) for start, end in times]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=LANES[lane], linewidth=0, snap=False)
    axes.set_yticks(range(len(busy_ms)), [f"{lane}  {ms:.1f} ms" for lane, ms in busy_ms.items()], fontsize=11)
    axes.set_ylim(len(busy_ms) - 0.5, -0.5)
    axes.set_xlim(0, length_ms)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    order = "" if timeline.overlaps else ". On the CPU copies run in program order, where they are called"
    label = f"ms since the step's first work. Beside each lane: ms busy; {STALL}: compute stands still{order}"
    axes.set_xlabel(label, fontsize=10)
    axes.set_title(f"{title}: {length_ms:.1f} ms", fontsize=12, loc="left")
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def merged(times: Iterable[tuple[float, float]], bridge_us: float = 0.0) -> Times:
    """The union of intervals, by their start; gaps of up to `bridge_us` are closed."""
    union: list[list[float]] = []
    for start, end in sorted(times):
        if union and start <= union[-1][1] + bridge_us:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    return [(start, end) for start, end in union]


def without(times: Times, holes: Times) -> Times:
    """What of `times` no hole covers; both merged."""
    left, hole = [], 0
    for start, end in times:
        while hole < len(holes) and holes[hole][1] <= start:
            hole += 1
        for hole_start, hole_end in holes[hole:]:
            if hole_start >= end:
                break
            if hole_start > start:
                left.append((start, hole_start))
            start = max(start, hole_end)
        if start < end:
            left.append((start, end))
    return left


def total_us(times: Times) -> float:
    return sum(end - start for start, end in times)


def _device_spans(events: Sequence[dict]) -> Iterator[Span]:
    compute = _compute_stream(events)
    copying = {_stream(event) for event in events if event["name"].startswith(tuple(COPIES))} - {compute}
    for event in events:
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        elsewhere = "kernels beside" if _stream(event) in copying else "compute"
        yield _span(next((lane for start, lane in COPIES.items() if event["name"].startswith(start)), elsewhere), event)


def _compute_stream(events: Sequence[dict]) -> int | None:
    """The stream whose kernels take longest."""
    total = defaultdict(float)
    for event in events:
        if event["cat"] == "kernel":
            total[_stream(event)] += event["dur"]
    return max(total, key=total.get, default=None)


def _program_spans(events: Sequence[dict], ranges: Sequence[dict]) -> Iterator[Span]:
    """What a CPU does in the threads that compute: the engine's ranges, and the operations outside them."""
    named = [(lane, event) for event in ranges if (lane := _lane_of_range(event))]
    yield from (_span(lane, event) for lane, event in named)
    operations, holes = defaultdict(list), defaultdict(list)
    for event in events:
        if event["cat"] == "cpu_op":
            operations[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for _, event in named:
        holes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for thread, times in operations.items():
        for start, end in without(merged(times), merged(holes[thread])):
            yield Span("compute", start, end)


def _lane_of_range(event: dict) -> str | None:
    return next((lane for start, lane in RANGES.items() if event["name"].startswith(start)), None)


def _stream(event: dict) -> int | None:
    return event.get("args", {}).get("stream")


def _span(lane: str, event: dict) -> Span:
    return Span(lane, event["ts"], event["ts"] + event["dur"])
