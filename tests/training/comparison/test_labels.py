"""Labels of points cover no point, no line, no bar and no other label."""

import random

import pytest

from tests.training.comparison.test_figures import check_apart, label_boxes, write_points
from training.comparison.figures import memory_figure


def pixels(axes, rows) -> list[tuple[float, float]]:
    points = [(row.mean("memory/vram_peak_gib"), row.mean("perf/step_ms")) for row in rows]
    return [tuple(point) for point in axes.transData.transform(points)]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.slow
def test_labels_cover_neither_points_nor_each_other(write_run, seed: int):
    generator = random.Random(seed)
    write_points(write_run, [(generator.uniform(5, 30), generator.uniform(300, 700)) for _ in range(12)])
    rows = write_run.rows()
    (axes,) = memory_figure(rows).axes
    boxes = label_boxes(axes)
    check_apart(boxes)
    assert not any(box.contains(x, y) for box in boxes for x, y in pixels(axes, rows))


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
