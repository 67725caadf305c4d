"""The timeline: spans read from a profiler's trace, and what they add up to."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from scripts.trace import Span, busy, draw, read_spans, stalls, summary

EVENTS = [
    {"cat": "cpu_op", "name": "aten::mm", "ts": 0.0, "dur": 5000.0},
    {"cat": "gpu_memcpy", "name": "Memcpy HtoD (Pinned -> Device)", "ts": 0.0, "dur": 900.0},
    {"cat": "kernel", "name": "gemm", "ts": 1000.0, "dur": 500.0},
    {"cat": "kernel", "name": "add", "ts": 1502.0, "dur": 98.0},
    {"cat": "gpu_memcpy", "name": "Memcpy DtoH (Device -> Pinned)", "ts": 1600.0, "dur": 700.0},
    {"cat": "kernel", "name": "gemm", "ts": 2000.0, "dur": 300.0},
    {"name": "a marker without a category", "ts": 1.0},
]


@pytest.fixture
def spans(tmp_path: Path) -> list[Span]:
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": EVENTS[::-1]}))
    return read_spans(path)


def test_device_work_is_sorted_into_lanes(spans: list[Span]):
    assert [(span.lane, span.start_us) for span in spans] == [
        ("copy in", 0.0), ("compute", 1000.0), ("compute", 1502.0), ("copy out", 1600.0), ("compute", 2000.0),
    ]  # fmt: skip


def test_busy_times_merge(spans: list[Span]):
    assert busy(spans, "compute") == [(1000.0, 1500.0), (1502.0, 1600.0), (2000.0, 2300.0)]
    assert busy(spans, "compute", bridge_us=5.0) == [(1000.0, 1600.0), (2000.0, 2300.0)]


def test_stalls_are_the_gaps_of_compute(spans: list[Span]):
    assert stalls(spans) == [(0.0, 1000.0), (1600.0, 2000.0)]
    assert summary(spans) == "step 2.3 ms; busy ms: copy in 0.9, compute 0.9, copy out 0.7, stall 1.4"


def test_the_chart_is_a_picture(spans: list[Span], tmp_path: Path):
    draw(spans, tmp_path / "step.png", "layer_stream")
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
