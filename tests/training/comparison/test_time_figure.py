"""The figure of where the time of a step goes: the parts of its bars, and the text beside them."""

from __future__ import annotations

import itertools

import pytest

from training.comparison.time_figure import split, time_figure


def test_the_parts_of_a_step_add_up(write_run):
    write_run(step_ms=100.0, transfer__stall_ms=30.0, optimizer__wait_ms=20.0)
    write_run("layer_stream", step_ms=100.0, transfer__stall_ms=90.0, optimizer__wait_ms=20.0)
    assert [split(row) for row in write_run.rows()] == [(50.0, 30.0, 20.0), (0.0, 90.0, 10.0)]


def test_the_bars_name_the_run_that_they_are_compared_with(write_run):
    for offload, step_ms in (("none", 100.0), ("layer_stream", 150.0)):
        for size in (8, 16):
            write_run(offload, step_ms=step_ms * size, transfer__stall_ms=1.0, top={"batch_size": size})
    (axes,) = time_figure(write_run.rows()).axes
    assert [text.get_text().replace("\n", " ") for text in axes.texts] == [
        "800 ms",
        "1,600 ms",
        "1,200 ms, 1.50 \N{MULTIPLICATION SIGN} none batch_size=8",
        "2,400 ms, 1.50 \N{MULTIPLICATION SIGN} none batch_size=16",
    ]


@pytest.mark.parametrize("files", ["/data/texts/" + "x" * 60 + "/train-*.parquet", ",".join(["y" * 50] * 30)])
@pytest.mark.slow
def test_labels_stay_on_the_figure(write_run, files: str):
    for slots in range(24):
        top = {"files": files[: 400 - slots % 2]}
        write_run("none", top=top, transfer__stall_ms=0.0)
        write_run("layer_stream", knobs={"slots": slots}, top=top, step_ms=100.0 + slots, transfer__stall_ms=2.0)
    figure = time_figure(write_run.rows())
    figure.canvas.draw()
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert all(label.get_window_extent().x0 >= 0 for label in axes.get_yticklabels())
    assert axes.bbox.width > 0.3 * figure.bbox.width
