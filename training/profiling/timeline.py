"""Records one training step with torch's profiler, reads the trace as a timeline, and draws the timeline.

The timeline has compute, copies in, copies out and stalls. The trace is in Chrome's trace event format, which
https://ui.perfetto.dev also opens. Times are in microseconds, as in the trace; pictures show milliseconds.
"""

import gzip
import io
import json
import logging
import math
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
from omegaconf import DictConfig

from offload import Streams
from training.errors import first_line
from training.runs.files import TRACE_FOLDER, write_whole

logger = logging.getLogger(__name__)

VIEWER = "https://ui.perfetto.dev"
STALL = "stall"
# The lanes from top to bottom, with their colours: Wong's palette (2011), which colour-blind readers can tell apart.
LANES = {
    "copy in": "#0072B2",
    "compute": "#009E73",
    "copy out": "#E69F00",
    "exchange": "#999999",
    "kernels beside": "#56B4E9",
    "host update": "#CC79A7",
    "device update": "#F0E442",
    STALL: "#D55E00",
}
# These lanes are drawn even if they are empty, the others only if they contain work.
ALWAYS_DRAWN = ("copy in", "compute", "copy out", STALL)
# Shorter gaps between kernels are the time of a launch, not a wait.
MIN_STALL_US = 50.0
COPY_LANES = {"Memcpy HtoD": "copy in", "Memcpy DtoH": "copy out"}
# One pixel as a share of the picture's time axis.
PIXEL_SHARE = 1 / 1300
# The prefixes of the engine's ranges (`profiled` in its `transfer.py`), and of the range that torch opens around
# optimizer.step.
RANGE_LANES = {
    "copy in ": "copy in",
    "copy out ": "copy out",
    "gather ": "exchange",
    "sum gradients ": "exchange",
    "update ": "host update",
    "Optimizer.step#": "host update",
}

# (start, end) pairs in microseconds.
Periods = list[tuple[float, float]]


@dataclass(frozen=True)
class Interval:
    """One piece of work in a lane, in microseconds of the trace's clock."""

    lane: str
    start_us: float
    end_us: float


@dataclass(frozen=True)
class Timeline:
    """The intervals of a step, sorted by start. `overlaps` is False on a CPU, which copies and computes in turn."""

    intervals: tuple[Interval, ...]
    overlaps: bool

    @property
    def start_us(self) -> float:
        return self.intervals[0].start_us

    @property
    def end_us(self) -> float:
        return max(interval.end_us for interval in self.intervals)

    def busy(self, lane: str, bridge_us: float = 0.0) -> Periods:
        """Returns the periods in which `lane` works, merged where they overlap or are `bridge_us` or less apart."""
        return merge(((work.start_us, work.end_us) for work in self.intervals if work.lane == lane), bridge_us)

    def stalls(self) -> Periods:
        """Returns the gaps in the compute lane, from the first to the last work of any lane."""
        computing = merge([*self.busy("compute"), *self.busy("device update")], MIN_STALL_US)
        gaps = subtract([(self.start_us, self.end_us)], computing)
        return [(start, end) for start, end in gaps if end - start > MIN_STALL_US]

    def busy_ms(self) -> dict[str, float]:
        """Returns the milliseconds that each lane works, without empty lanes that are not always drawn."""
        periods = {lane: self.stalls() if lane == STALL else self.busy(lane) for lane in LANES}
        found = {lane: sum(end - start for start, end in worked) / 1e3 for lane, worked in periods.items()}
        return {lane: ms for lane, ms in found.items() if ms or lane in ALWAYS_DRAWN}

    def summary(self) -> str:
        """Returns one line with the length of the step and the milliseconds that each lane was busy."""
        parts = ", ".join(f"{lane} {ms:.1f}" for lane, ms in self.busy_ms().items())
        return f"step {(self.end_us - self.start_us) / 1e3:.1f} ms; busy ms: {parts}"


def read_timeline(path: Path) -> Timeline:
    """Reads the timeline of a trace, whether compressed (.gz) or not. Raises ValueError for one without work.

    For a GPU the timeline has the device's work by stream: kernels on the compute stream, kernels on the copy streams
    (norms and sums of gradients, updates of states on the device), and copies by direction. A CPU copies in the thread
    that computes: for it the timeline has the engine's ranges, and as compute the operations outside these ranges.
    """
    content = path.read_bytes()
    trace = json.loads(gzip.decompress(content) if path.suffix == ".gz" else content)
    events = [event for event in trace["traceEvents"] if "dur" in event and "cat" in event]
    ranges = [event for event in events if event["cat"] == "user_annotation"]
    overlaps = any(event["cat"] in ("kernel", "gpu_memcpy") for event in events)
    if overlaps:
        updates = [event for event in ranges if _lane_of(event, RANGE_LANES) == "host update"]
        intervals = [*_device_intervals(events), *(_interval("host update", event) for event in updates)]
    else:
        intervals = list(_program_intervals(events, ranges))
    if not intervals:
        raise ValueError(f"{path}: the trace contains no work of the device")
    return Timeline(tuple(sorted(intervals, key=lambda interval: interval.start_us)), overlaps)


def draw_chart(timeline: Timeline, path: Path, title: str) -> None:
    """Writes the Gantt chart of a step to `path`, a PNG file 1600 pixels wide."""
    # Without pyplot, which would choose a window system for the whole process.
    from matplotlib.figure import Figure

    busy_ms, length_ms = timeline.busy_ms(), (timeline.end_us - timeline.start_us) / 1e3
    figure = Figure(figsize=(12.3, 1.35 + 0.42 * len(busy_ms)))
    axes = figure.add_subplot()
    for row, lane in enumerate(busy_ms):
        periods = timeline.stalls() if lane == STALL else timeline.busy(lane, bridge_us=5.0)
        # A short copy must be visible, so its bar has at least one pixel; but many short kernels must not look like a
        # long one.
        min_ms = 0.0 if lane == "compute" else length_ms * PIXEL_SHARE
        bars = [((start - timeline.start_us) / 1e3, max((end - start) / 1e3, min_ms)) for start, end in periods]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=LANES[lane], linewidth=0, snap=False)
    axes.set_yticks(range(len(busy_ms)), [f"{lane}  {ms:.1f} ms" for lane, ms in busy_ms.items()], fontsize=11)
    axes.set_ylim(len(busy_ms) - 0.5, -0.5)
    axes.set_xlim(0, length_ms)
    axes.grid(axis="x", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    order = "" if timeline.overlaps else ". On the CPU copies run in program order, where they are called"
    label = f"ms since the step's first work. Beside each lane: ms busy; {STALL}: compute waits{order}"
    axes.set_xlabel(label, fontsize=10)
    axes.set_title(f"{title}: {length_ms:.1f} ms", fontsize=12, loc="left")
    figure.tight_layout()
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=130)
    write_whole(path, content.getvalue())


def merge(periods: Iterable[tuple[float, float]], bridge_us: float = 0.0) -> Periods:
    """Returns the union of periods, sorted, with gaps of up to `bridge_us` closed."""
    union: list[list[float]] = []
    for start, end in sorted(periods):
        if union and start <= union[-1][1] + bridge_us:
            union[-1][1] = max(union[-1][1], end)
        else:
            union.append([start, end])
    return [(start, end) for start, end in union]


def subtract(periods: Periods, holes: Periods) -> Periods:
    """Returns the parts of `periods` that no hole covers. Both lists must be merged."""
    outside = _between([(0.0, -math.inf), *periods, (math.inf, 0.0)])
    return _between(merge([*outside, *holes]))


def _between(periods: Periods) -> Periods:
    return [(end, start) for (_, end), (start, _) in pairwise(periods)]


def _device_intervals(events: Sequence[dict]) -> Iterator[Interval]:
    """Yields the work of a GPU: copies by direction, and kernels by the kind of their stream."""
    total = Counter()
    for event in events:
        if event["cat"] == "kernel":
            total[_stream(event)] += event["dur"]
    # The stream whose kernels take the most time.
    compute = max(total, key=total.get, default=None)
    copying = {_stream(event) for event in events if event["name"].startswith(tuple(COPY_LANES))} - {compute}
    for event in events:
        if event["cat"] not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        lane = _lane_of(event, COPY_LANES) or ("kernels beside" if _stream(event) in copying else "compute")
        yield _interval(lane, event)


def _program_intervals(events: Sequence[dict], ranges: Sequence[dict]) -> Iterator[Interval]:
    """Yields the work of a CPU: the engine's ranges, and, as compute, the operations of each thread outside of them."""
    named = [(lane, event) for event in ranges if (lane := _lane_of(event, RANGE_LANES))]
    yield from (_interval(lane, event) for lane, event in named)
    operations, holes = defaultdict(list), defaultdict(list)
    for event in events:
        if event["cat"] == "cpu_op":
            operations[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for _, event in named:
        holes[event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for thread, periods in operations.items():
        for start, end in subtract(merge(periods), merge(holes[thread])):
            yield Interval("compute", start, end)


def _lane_of(event: dict, lanes: Mapping[str, str]) -> str | None:
    return next((lane for prefix, lane in lanes.items() if event["name"].startswith(prefix)), None)


def _stream(event: dict) -> int | None:
    return event.get("args", {}).get("stream")


def _interval(lane: str, event: dict) -> Interval:
    return Interval(lane, event["ts"], event["ts"] + event["dur"])


class StepTrace(NamedTuple):
    """The files of a traced step: `trace`, in Chrome's format, compressed; `picture`, a PNG, None if drawing failed."""

    step: int
    trace: Path
    picture: Path | None


class Tracer:
    """Traces one step of a run that starts after `steps_done` steps. An error is a warning and does not end the run."""

    def __init__(self, config: DictConfig, run_dir: Path, streams: Streams, title: str, steps_done: int = 0):
        self.step = step_to_trace(config, steps_done)
        self._run_dir, self._streams, self._title = run_dir, streams, title
        self._profiling = ExitStack()
        self._trace = run_dir / TRACE_FOLDER / f"step-{self.step}.json.gz"

    def start(self, step: int) -> bool:
        """Starts recording if `step` is the step to trace; call it before the step. Returns True while recording."""
        if step != self.step:
            return False
        try:
            self._trace.parent.mkdir(exist_ok=True)
            self._profiling.enter_context(tracing(self._trace, self._streams))
        except Exception as error:  # profilers, drivers and disks fail in many ways, and none is worth losing a run
            self._warn(error)
            return False
        return True

    def stop(self) -> StepTrace | None:
        """Ends the recording after that step, and writes and draws it. Returns None, with a warning, on failure."""
        try:
            self._profiling.close()
        except Exception as error:
            return self._warn(error)
        picture: Path | None = self._trace.with_name(f"step-{self.step}.png")
        try:
            draw_chart(read_timeline(self._trace), picture, f"{self._title}, step {self.step}")
        except Exception as error:
            logger.warning("trace=true: drawing step %d failed (%s)", self.step, first_line(error))
            picture = None
        logger.info("trace: step %d in %s; open it in %s", self.step, self._trace, VIEWER)
        return StepTrace(self.step, self._trace, picture)

    def close(self) -> None:
        """Discards a recording whose step failed."""
        with suppress(Exception), self._profiling:
            raise InterruptedError

    def _warn(self, error: Exception) -> None:
        logger.warning("trace=true: tracing step %d failed (%s); the run continues", self.step, first_line(error))


def step_to_trace(config: DictConfig, steps_done: int = 0) -> int | None:
    """Returns the step that a run traces, the first after the warm-up; None without `trace`.

    The run starts, or goes on, after `steps_done` steps.
    """
    return min(steps_done + config.warmup_steps + 1, config.steps) if config.trace else None


@contextmanager
def tracing(path: Path, streams: Streams) -> Iterator[None]:
    """Profiles the block, in all threads, and writes the trace to `path` (compressed for .gz), unless the block raises.

    The device is idle at the start and at the end, so that the trace contains all work of the block and no other.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    if streams.device.type == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    # The profiler then prints nothing to the terminal when it starts and stops.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # By default a trace lacks the optimizer's thread, which autograd does not know.
    threads = torch._C._profiler._ExperimentalConfig(profile_all_threads=True)
    profile = torch.profiler.profile(activities=activities, experimental_config=threads)
    streams.synchronize()
    with profile:
        yield
        streams.synchronize()
    # Renamed when complete, so that a file with the final name is always whole.
    partial = path.with_name(f"partial-{path.name}")
    profile.export_chrome_trace(str(partial))
    partial.replace(path)
