"""The intervals of a timeline, read from a profiler's trace, and their sums and picture."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from matplotlib import image

from training.profiling.timeline import Timeline, draw_chart, merge, read_timeline, subtract

COMPUTE, IN, OUT = 7, 13, 17


def event(cat: str, name: str, ts: float, dur: float, tid: int = 1, **args: object) -> dict:
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": tid, "args": args}


GPU = [
    event("cpu_op", "aten::mm", 0.0, 5000.0),
    event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 900.0, stream=IN),
    event("kernel", "gemm", 1000.0, 500.0, stream=COMPUTE),
    event("kernel", "add", 1502.0, 98.0, stream=COMPUTE),
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 1600.0, 700.0, stream=OUT),
    event("kernel", "norm of a gradient", 1700.0, 100.0, stream=OUT),
    event("kernel", "gemm", 2000.0, 300.0, stream=COMPUTE),
    event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 2300.0, 10.0, stream=COMPUTE),
    event("user_annotation", "update layers.0", 1900.0, 600.0, tid=2),
    event("user_annotation", "copy in layers.0", 0.0, 5.0),
    {"name": "a marker without a category", "ts": 1.0},
    {"cat": "Trace", "name": "PyTorch Profiler (0)", "ts": 0.0, "dur": 9000.0, "tid": 0},
]
CPU = [
    event("cpu_op", "evaluate_function", 0.0, 1000.0),
    event("user_annotation", "copy in layers.0", 200.0, 300.0),
    event("cpu_op", "aten::copy_", 210.0, 280.0),
    event("user_annotation", "copy out gradient of layers.0", 700.0, 100.0),
    event("user_annotation", "update layers.0", 600.0, 500.0, tid=2),
    event("cpu_op", "aten::addcdiv_", 610.0, 480.0, tid=2),
    event("user_annotation", "Optimizer.step#AdamW.step", 1000.0, 200.0),
    event("user_annotation", "somebody else's range", 0.0, 4000.0),
]


def write(path: Path, events: list[dict]) -> Path:
    content = json.dumps({"traceEvents": events[::-1]}).encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


@pytest.fixture
def gpu(tmp_path: Path) -> Timeline:
    return read_timeline(write(tmp_path / "trace.json.gz", GPU))


def test_device_work_is_sorted_into_lanes(gpu: Timeline):
    assert gpu.overlaps
    assert [(work.lane, work.start_us) for work in gpu.intervals] == [
        ("copy in", 0.0), ("compute", 1000.0), ("compute", 1502.0), ("copy out", 1600.0), ("kernels beside", 1700.0),
        ("host update", 1900.0), ("compute", 2000.0), ("compute", 2300.0),
    ]  # fmt: skip


def test_busy_times_merge(gpu: Timeline):
    assert gpu.busy("compute") == [(1000.0, 1500.0), (1502.0, 1600.0), (2000.0, 2310.0)]
    assert gpu.busy("compute", bridge_us=5.0) == [(1000.0, 1600.0), (2000.0, 2310.0)]


def test_stalls_are_the_gaps_of_compute(gpu: Timeline):
    assert gpu.stalls() == [(0.0, 1000.0), (1600.0, 2000.0), (2310.0, 2500.0)]
    assert gpu.summary() == (
        "step 2.5 ms; busy ms: copy in 0.9, compute 0.9, copy out 0.7, kernels beside 0.1, host update 0.6, stall 1.6"
    )


def test_kernels_on_a_compute_stream_that_also_copies_are_compute(tmp_path: Path):
    events = [
        event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 0.0, 1.0, stream=COMPUTE),
        event("kernel", "gemm", 1.0, 500.0, stream=COMPUTE),
    ]
    assert read_timeline(write(tmp_path / "t.json", events)).busy("compute") == [(1.0, 501.0)]


def test_on_a_cpu_operations_outside_the_engines_ranges_are_compute(tmp_path: Path):
    timeline = read_timeline(write(tmp_path / "trace.json", CPU))
    assert not timeline.overlaps
    assert timeline.busy("compute") == [(0.0, 200.0), (500.0, 700.0), (800.0, 1000.0)]
    assert timeline.busy("copy in") == [(200.0, 500.0)]
    assert timeline.busy("copy out") == [(700.0, 800.0)]
    assert timeline.busy("host update") == [(600.0, 1200.0)]
    assert timeline.stalls() == [(200.0, 500.0), (700.0, 800.0), (1000.0, 1200.0)]


def test_a_trace_without_work_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="contains no work"):
        read_timeline(write(tmp_path / "trace.json", [event("user_annotation", "somebody's", 0.0, 1.0)]))


@pytest.mark.parametrize(
    ("periods", "holes", "left"),
    [
        ([(0, 10)], [], [(0, 10)]),
        ([(0, 10)], [(0, 10)], []),
        ([(0, 10)], [(-5, 2), (4, 6), (9, 12)], [(2, 4), (6, 9)]),
        ([(0, 3), (5, 8)], [(2, 6)], [(0, 2), (6, 8)]),
        ([(5, 8)], [(0, 1), (6, 7), (9, 10)], [(5, 6), (7, 8)]),
        ([(0, 2), (3, 4)], [(1, 10)], [(0, 1)]),
    ],
)
def test_holes_are_subtracted(periods: list, holes: list, left: list):
    assert subtract(periods, holes) == left


def test_merge_accepts_any_order_and_nesting():
    assert merge([(5, 6), (0, 4), (1, 2), (3, 4.5)]) == [(0, 4.5), (5, 6)]


@pytest.mark.parametrize("events", [GPU, CPU], ids=["gpu", "cpu"])
@pytest.mark.slow
def test_the_chart_is_a_picture_in_the_lanes_colours(tmp_path: Path, events: list[dict]):
    draw_chart(read_timeline(write(tmp_path / "t.json", events)), tmp_path / "step.png", "tiny-layer_stream-0, step 6")
    pixels = (image.imread(tmp_path / "step.png")[:, :, :3] * 255).round().astype(int)
    assert pixels.shape[1] == 1599
    colours = {tuple(pixel) for pixel in pixels.reshape(-1, 3)}
    assert {(0x00, 0x72, 0xB2), (0x00, 0x9E, 0x73), (0xE6, 0x9F, 0x00), (0xCC, 0x79, 0xA7)} <= colours
