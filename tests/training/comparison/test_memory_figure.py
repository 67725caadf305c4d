"""The figure of step time against memory: its points, the front, and labels that can be read."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from training.comparison import memory_figure as figures
from training.comparison.canvas import png
from training.comparison.memory_figure import memory_figure

LONG_NAMES = ["/data/texts/" + "x" * 60 + "/train-*.parquet", ",".join(["y" * 50] * 30)]


def label_boxes(axes):
    return [text.get_window_extent() for text in axes.texts]


def pixels(axes, rows) -> list[tuple[float, float]]:
    points = [(row.mean("memory/vram_peak_gib"), row.mean("perf/step_ms")) for row in rows]
    return [tuple(point) for point in axes.transData.transform(points)]


def write_points(write_run, points):
    for slots, (gib, step_ms) in enumerate(points):
        write_run("layer_stream", knobs={"slots": slots}, step_ms=step_ms, memory__vram_peak_gib=gib)


@pytest.mark.parametrize("files", LONG_NAMES)
def test_labels_stay_on_the_figure(write_run, files: str):
    for slots in range(4):
        top = {"files": files[: 400 - slots % 2]}
        write_run("none", top=top, memory__vram_peak_gib=31.0)
        write_run("layer_stream", knobs={"slots": slots}, top=top, step_ms=100.0 + slots,
                  memory__vram_peak_gib=30.0 - slots)  # fmt: skip
    figure = memory_figure(write_run.rows())
    boxes = label_boxes(figure.axes[0])
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert figure.axes[0].bbox.width > 0.3 * figure.bbox.width


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_labels_cover_neither_points_nor_each_other(write_run, seed: int):
    generator = random.Random(seed)
    write_points(write_run, [(generator.uniform(5, 30), generator.uniform(300, 700)) for _ in range(12)])
    rows = write_run.rows()
    (axes,) = memory_figure(rows).axes
    boxes = label_boxes(axes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert not any(box.contains(x, y) for box in boxes for x, y in pixels(axes, rows))


def test_labels_of_equal_points_are_apart_and_joined_to_their_point(write_run):
    write_points(write_run, [(10.0, 100.0)] * 4)
    rows = write_run.rows()
    (axes,) = memory_figure(rows).axes
    boxes = label_boxes(axes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    distances = [
        math.dist((x, y), (min(max(x, box.x0), box.x1), min(max(y, box.y0), box.y1)))
        for box, (x, y) in zip(boxes, pixels(axes, rows), strict=True)
    ]
    assert len(axes.patches) >= sum(distance > 5 for distance in distances) > 0


def test_labels_avoid_the_front(write_run):
    write_points(write_run, [(20.0 - i, 300.0 + 20 * i) for i in range(10)])
    rows = write_run.rows()
    (axes,) = memory_figure(rows).axes
    (x0, y0), (x1, y1) = pixels(axes, rows)[0], pixels(axes, rows)[-1]
    line = [(x0 + (x1 - x0) * i / 1000, y0 + (y1 - y0) * i / 1000) for i in range(1001)]
    assert not any(box.contains(x, y) for box in label_boxes(axes) for x, y in line)


def test_labels_avoid_the_bars_of_the_spread(write_run):
    for slots, (gib, step_ms) in enumerate([(20.0, 300.0), (20.6, 310.0), (21.2, 290.0), (10.0, 500.0)]):
        for seed, factor in ((0, 0.7), (1, 1.3)):
            write_run("layer_stream", seed=seed, knobs={"slots": slots}, step_ms=step_ms * factor,
                      memory__vram_peak_gib=gib)  # fmt: skip
    rows = write_run.rows()
    (axes,) = memory_figure(rows).axes
    for row in rows:
        gib, step = row.mean("memory/vram_peak_gib"), row.statistics["perf/step_ms"]
        (x, low), (_, high) = axes.transData.transform([(gib, step.mean - step.spread), (gib, step.mean + step.spread)])
        assert not any(box.x0 < x < box.x1 and box.y0 < high and low < box.y1 for box in label_boxes(axes))


def test_the_same_rows_give_the_same_figure(write_run):
    write_points(write_run, [(10.0, 100.0), (10.0, 100.0), (10.1, 101.0), (20.0, 90.0)])
    rows = write_run.rows()
    assert png(memory_figure(rows)) == png(memory_figure(rows))


def test_a_plan_that_does_not_fit_is_beside_the_front(write_run):
    for offload, step_ms, gib, fits in (("none", 100.0, 100.0, False), ("layer_stream", 200.0, 20.0, True)):
        plan = {"fits": {"vram_budget": fits}, "budget_bytes": {"vram_budget": 24 * 2**30}}
        write_run(offload, status="planned", losses=None, plan=plan, step_ms=step_ms, memory__vram_peak_gib=gib)
    (axes,) = memory_figure(write_run.rows()).axes
    assert axes.lines[0].get_xydata().tolist() == [[20.0, 200.0]]
    assert [24.0, 24.0] in [list(line.get_xdata()) for line in axes.lines]
    assert [text.get_text() for text in axes.texts] == ["none: does not fit the\ndevice", "layer_stream"]
    assert axes.get_title().startswith("Planned step time")


def test_a_forward_without_its_backward_is_beside_the_front(write_run):
    write_run("none", step_ms=300.0, memory__vram_peak_gib=50.0)
    write_run("layer_stream", step_ms=200.0, memory__vram_peak_gib=2.0, forward_only=True)
    (axes,) = memory_figure(write_run.rows()).axes
    assert axes.lines[0].get_xydata().tolist() == [[50.0, 300.0]]
    assert [text.get_text() for text in axes.texts] == ["none", "layer_stream: forward only"]


def test_of_many_points_those_on_the_front_are_named_first(write_run, monkeypatch):
    monkeypatch.setattr(figures, "MOST_NAMED", 3)
    write_points(write_run, [(20.0, 200.0), (21.0, 210.0), (22.0, 220.0), (10.0, 300.0), (30.0, 100.0)])
    (axes,) = memory_figure(write_run.rows()).axes
    assert [text.get_text() for text in axes.texts] == [f"layer_stream slots={slots}" for slots in (0, 3, 4)]
