"""One training step as a timeline: what computes, what is copied in and out, and where compute stands still.

    python scripts/trace.py --mode layer_stream --out traces                 # as scripts/bench.py measures it
    python scripts/trace.py --mode bounce_linear:slots=6 --sequences 8 --recompute

Writes DIR/MODE.json, which https://ui.perfetto.dev opens, and DIR/MODE.png, a Gantt chart of the step, and prints how
long each lane was busy. Needs a GPU: on the CPU copies run where they are called, so there is nothing beside anything.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from scripts.bench import Workload, parser

LANES = ("copy in", "compute", "copy out")
COLOURS = {"copy in": "#2a78b5", "compute": "#3a9a5b", "copy out": "#c8642c", "stall": "#d62f3e"}
# Gaps between kernels shorter than this are the launch's, not a wait's.
STALL_US = 50.0


@dataclass(frozen=True)
class Span:
    """Work of one lane, in microseconds of the trace's clock."""

    lane: str
    start_us: float
    end_us: float


def record(workload: Workload, path: Path, warmup_steps: int = 3) -> None:
    """Runs a few steps and writes the trace of the last one to `path`."""
    with workload:
        for _ in range(warmup_steps):
            workload.step()
        activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        torch.cuda.synchronize()
        with torch.profiler.profile(activities=activities) as profile:
            workload.step()
            torch.cuda.synchronize()
    profile.export_chrome_trace(str(path))


def read_spans(path: Path) -> list[Span]:
    """The device's work in a trace: kernels, and copies by direction, in order of their start."""
    lanes = {"Memcpy HtoD": "copy in", "Memcpy DtoH": "copy out"}
    spans = []
    for event in json.loads(path.read_text())["traceEvents"]:
        category = event.get("cat")
        if category not in ("kernel", "gpu_memcpy", "gpu_memset"):
            continue
        lane = next((lane for start, lane in lanes.items() if event["name"].startswith(start)), "compute")
        spans.append(Span(lane, event["ts"], event["ts"] + event["dur"]))
    return sorted(spans, key=lambda span: span.start_us)


def busy(spans: Sequence[Span], lane: str, bridge_us: float = 0.0) -> list[tuple[float, float]]:
    """The times when `lane` works: overlapping spans merged, and gaps of up to `bridge_us` closed."""
    merged: list[list[float]] = []
    for span in spans:
        if span.lane != lane:
            continue
        if merged and span.start_us <= merged[-1][1] + bridge_us:
            merged[-1][1] = max(merged[-1][1], span.end_us)
        else:
            merged.append([span.start_us, span.end_us])
    return [(start, end) for start, end in merged]


def stalls(spans: Sequence[Span]) -> list[tuple[float, float]]:
    """The gaps of the compute lane between the first and the last work of any lane."""
    working = busy(spans, "compute", STALL_US)
    first, last = min(span.start_us for span in spans), max(span.end_us for span in spans)
    edges = [first, *(edge for interval in working for edge in interval), last]
    return [(start, end) for start, end in zip(edges[::2], edges[1::2], strict=True) if end - start > STALL_US]


def summary(spans: Sequence[Span]) -> str:
    """One line: the length of the step, and the ms that each lane was busy."""
    first, last = min(span.start_us for span in spans), max(span.end_us for span in spans)
    lanes = {lane: busy(spans, lane) for lane in LANES} | {"stall": stalls(spans)}
    parts = (f"{lane} {sum(end - start for start, end in times) / 1e3:.1f}" for lane, times in lanes.items())
    return f"step {(last - first) / 1e3:.1f} ms; busy ms: {', '.join(parts)}"


def draw(spans: Sequence[Span], path: Path, title: str) -> None:
    """The Gantt chart of a step as a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    first = min(span.start_us for span in spans)
    figure, axes = pyplot.subplots(figsize=(16, 3.2))
    rows = [(lane, busy(spans, lane, bridge_us=5.0)) for lane in LANES] + [("stall", stalls(spans))]
    for row, (lane, times) in enumerate(rows):
        bars = [((start - first) / 1e3, (end - start) / 1e3) for start, end in times]
        axes.broken_barh(bars, (row - 0.4, 0.8), color=COLOURS[lane], edgecolor="white", linewidth=0.2)
    axes.set_yticks(range(len(rows)), [lane for lane, _ in rows])
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    axes.set_title(f"{title}: {summary(spans)}", fontsize=10, loc="left")
    axes.margins(x=0.005)
    figure.tight_layout()
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def main() -> None:
    options_parser = parser(__doc__)
    options_parser.add_argument("--mode", default="layer_stream", metavar="MODE[:KEY=VALUE,...]")
    options_parser.add_argument("--out", type=Path, default=Path("traces"), metavar="DIR")
    options = options_parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: --device: a timeline needs a GPU, and torch finds none")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"{re.sub(r'[^A-Za-z0-9.-]', '_', options.mode)}.json"
    record(Workload(options.mode, options), path)
    spans = read_spans(path)
    print(f"{options.mode}: {summary(spans)}")
    draw(spans, path.with_suffix(".png"), options.mode)
    print(f"{path}  (open in https://ui.perfetto.dev)\n{path.with_suffix('.png')}")


if __name__ == "__main__":
    main()
