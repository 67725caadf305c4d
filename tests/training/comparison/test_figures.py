"""Figures: that they are drawn of what there is, and that no label lies over another."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from training.comparison.labels import Box, is_far, place
from training.comparison.loss_figure import alike, loss_figure, spread
from training.comparison.memory_figure import memory_figure
from training.comparison.page import draw
from training.comparison.rows import build_rows
from training.comparison.runs import find_runs
from training.comparison.time_figure import split, time_figure
from training.runs.files import COMPARISON_PICTURES

PNG = b"\x89PNG"
NAN = math.nan


def rows(write_run):
    return build_rows(find_runs([write_run.folder]))


def files(pictures) -> list[str]:
    assert all(picture.png.startswith(PNG) for picture in pictures)
    return [picture.file for picture in pictures]


@pytest.mark.parametrize("count", [1, 12])
def test_every_figure_is_drawn(write_run, count: int):
    for i in range(count):
        write_run("layer_stream", knobs={"slots": i}, step_ms=10.0 * 2**i, memory__vram_peak_gib=20.0 - i,
                  transfer__stall_ms=3.0, losses=(4.0, 3.0 + i))  # fmt: skip
    assert files(draw(rows(write_run))) == list(COMPARISON_PICTURES)


def test_without_a_gpu_the_memory_is_that_of_the_process(write_run):
    write_run(memory__vram_peak_gib=0.0, memory__rss_gib=0.5, losses=(math.nan, math.inf), step_ms=5.0)
    assert files(draw(rows(write_run))) == ["compare_memory.png", "compare_loss.png"]


def test_a_run_on_the_cpu_is_no_point_among_those_on_a_gpu(write_run):
    write_run(memory__vram_peak_gib=0.0, memory__rss_gib=0.5, hardware={"device": "cpu"})
    write_run(memory__vram_peak_gib=3.0, memory__rss_gib=0.5, hardware={"device": "cuda:0", "gpu_name": "H200"})
    of_cpu, of_both = draw(rows(write_run)[:1])[0], draw(rows(write_run))[0]
    assert of_both.png == draw(rows(write_run)[1:])[0].png
    assert of_both.png != of_cpu.png


def test_a_sweep_of_failures_has_the_losses_that_there_are(write_run):
    write_run(status="failed", reason="lr")
    assert files(draw(rows(write_run))) == ["compare_loss.png"]


def test_a_sweep_without_any_figure_has_no_pictures(write_run):
    write_run(status="failed", reason="lr", losses=None)
    assert draw(rows(write_run)) == []


def test_the_parts_of_a_step_add_up(write_run):
    write_run(step_ms=100.0, transfer__stall_ms=30.0, optimizer__wait_ms=20.0)
    write_run("layer_stream", step_ms=100.0, transfer__stall_ms=90.0, optimizer__wait_ms=20.0)
    assert [split(row) for row in rows(write_run)] == [(50.0, 30.0, 20.0), (0.0, 90.0, 10.0)]


def test_equal_curves_share_a_line(write_run):
    write_run("none", losses=(4.0, 3.0))
    write_run("layer_stream", losses=(4.0, 3.0))
    write_run("tensor_swap", losses=(4.0, math.nextafter(3.0, 4.0)))
    assert [curve.label.replace("\n", " ") for curve in alike(rows(write_run))] == [
        "none, layer_stream: equal in every bit",
        "tensor_swap",
    ]


def test_runs_that_repeat_each_other_make_no_curve_of_their_own(write_run):
    write_run("none", losses=(4.0, 3.0))
    write_run("shard_offload", recompute="none", losses=(4.0, 3.0))
    write_run("shard_offload", recompute="block", losses=(4.0, 3.0))
    (curve,) = alike(rows(write_run))
    assert curve.label.replace("\n", " ") == "none, shard_offload: equal in every bit"


def test_a_curve_is_the_mean_of_its_seeds_in_their_range(write_run):
    write_run(seed=0, losses=(4.0, 2.0, 1.0))
    write_run(seed=1, losses=(6.0, 3.0))
    (curve,) = alike(rows(write_run))
    assert (curve.steps, curve.mean, curve.low, curve.high) == ([1, 2], [5.0, 2.5], [4.0, 2.0], [6.0, 3.0])


def test_runs_that_repeat_a_seed_count_as_one_in_its_curve(write_run):
    for seed, loss in ((0, 2.0), (0, 4.0), (1, 5.0)):
        write_run(seed=seed, losses=(4.0, loss))
    (curve,) = alike(rows(write_run))
    assert (curve.mean, curve.low, curve.high) == ([4.0, 4.0], [4.0, 3.0], [4.0, 5.0])


def test_the_bars_name_the_run_that_they_are_compared_with(write_run):
    for offload, step_ms in (("none", 100.0), ("layer_stream", 150.0)):
        for size in (8, 16):
            write_run(offload, step_ms=step_ms * size, transfer__stall_ms=1.0, top={"batch_size": size})
    (axes,) = time_figure(rows(write_run)).axes
    assert [text.get_text().replace("\n", " ") for text in axes.texts] == [
        "800 ms",
        "1,600 ms",
        "1,200 ms, 1.50 \N{MULTIPLICATION SIGN} none batch_size=8",
        "2,400 ms, 1.50 \N{MULTIPLICATION SIGN} none batch_size=16",
    ]


@pytest.mark.parametrize(
    ("losses", "end", "note"),
    [
        ((4.0, 3.0, 2.0), (3, 2.0), ""),
        ((4.0, NAN, 2.0), (3, 2.0), ""),
        ((4.0, 3.0, NAN), (2, 3.0), ": not finite from step 3"),
        ((4.0, math.inf, NAN), (1, 4.0), ": not finite from step 2"),
        ((NAN, NAN, NAN), None, ": not finite from step 1"),
    ],
)
def test_a_curve_that_diverged_ends_at_its_last_finite_loss_and_says_so(write_run, losses, end, note: str):
    write_run(losses=losses)
    (curve,) = alike(rows(write_run))
    assert (curve.end, curve.label.replace("\n", " ")) == (end, f"none{note}")
    assert "compare_loss.png" in files(draw(rows(write_run)))


def test_one_loss_that_is_not_finite_is_named_without_a_line(write_run):
    write_run(losses=(NAN,))
    figure = loss_figure(rows(write_run))
    assert [text.get_text().replace("\n", " ") for text in figure.axes[0].texts] == ["none: not finite from step 1"]


@pytest.mark.parametrize("figure", [loss_figure, time_figure, memory_figure])
@pytest.mark.parametrize("files", ["/data/texts/" + "x" * 60 + "/train-*.parquet", ",".join(["y" * 50] * 30)])
def test_labels_stay_on_the_picture(write_run, figure, files: str):
    for slots in range(24 if figure is not memory_figure else 4):
        knobs, top = {"slots": slots}, {"files": files[: 400 - slots % 2]}
        write_run("none", top=top, transfer__stall_ms=0.0, memory__vram_peak_gib=31.0)
        write_run("layer_stream", knobs=knobs, top=top, step_ms=100.0 + slots, losses=(4.0, 2.0 + slots),
                  transfer__stall_ms=2.0, memory__vram_peak_gib=30.0 - slots)  # fmt: skip
    drawn = figure(rows(write_run))
    drawn.canvas.draw()
    (axes,) = drawn.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    assert all(box.x0 >= 0 and box.x1 <= drawn.bbox.x1 for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= drawn.bbox.y1 for box in boxes)
    assert all(label.get_window_extent().x0 >= 0 for label in axes.get_yticklabels())
    assert axes.bbox.width > 0.3 * drawn.bbox.width


@pytest.mark.parametrize("seed", range(5))
def test_labels_cover_neither_points_nor_each_other(seed: int):
    draw_from = random.Random(seed)
    frame = Box(0, 0, 800, 500)
    points = [(draw_from.uniform(50, 750), draw_from.uniform(50, 450)) for _ in range(12)]
    boxes = place(points, [(90, 24)] * 12, frame, marker=5)
    assert all(box.overlap(frame) == pytest.approx(box.area) for box in boxes)
    assert all(one.overlap(other) == 0 for one, other in itertools.combinations(boxes, 2))
    assert all(box.overlap(Box(x - 5, y - 5, x + 5, y + 5)) == 0 for box in boxes for x, y in points)


def test_a_label_that_is_nearer_to_another_point_is_tied_to_its_own():
    points = [(214.0, 100.0), (200.0, 100.0)]
    boxes = place(points, [(90, 24)] * 2, Box(0, 0, 230, 200), marker=5)
    for point, other, box in zip(points, reversed(points), boxes, strict=True):
        is_own = math.dist(point, box.nearest(point)) < math.dist(other, box.nearest(other))
        assert is_own or is_far(point, box)


def test_labels_avoid_lines():
    line = ((0.0, 100.0), (400.0, 100.0))
    (box,) = place([(200.0, 100.0)], [(90, 24)], Box(0, 0, 400, 200), marker=5, lines=[line])
    assert not box.bottom < 100 < box.top


def test_labels_of_points_avoid_the_bars_of_the_spread(write_run):
    for slots, (gib, step_ms) in enumerate([(20.0, 300.0), (20.6, 310.0), (21.2, 290.0), (10.0, 500.0)]):
        for seed, factor in ((0, 0.7), (1, 1.3)):
            write_run("layer_stream", seed=seed, knobs={"slots": slots}, step_ms=step_ms * factor,
                      memory__vram_peak_gib=gib)  # fmt: skip
    found = rows(write_run)
    figure = memory_figure(found)
    (axes,) = figure.axes
    boxes = [text.get_window_extent() for text in axes.texts]
    for row in found:
        gib, step = row.mean("memory/vram_peak_gib"), row.figures["perf/step_ms"]
        (x, low), (_, high) = axes.transData.transform([(gib, step.mean - step.spread), (gib, step.mean + step.spread)])
        assert not any(box.x0 < x < box.x1 and box.y0 < high and low < box.y1 for box in boxes)


def test_a_plan_that_does_not_fit_is_beside_the_front(write_run):
    for offload, step_ms, gib, fits in (("none", 100.0, 100.0, False), ("layer_stream", 200.0, 20.0, True)):
        plan = {"fits": {"vram_budget": fits}}
        write_run(offload, status="planned", losses=None, plan=plan, step_ms=step_ms, memory__vram_peak_gib=gib)
    (axes,) = memory_figure(rows(write_run)).axes
    assert axes.lines[0].get_xydata().tolist() == [[20.0, 200.0]]
    assert [text.get_text() for text in axes.texts] == ["none: does not fit", "layer_stream"]
    assert axes.get_title().startswith("Planned step time")
    (picture,) = draw(rows(write_run))
    assert "Plans that do not fit are off it." in picture.caption


@pytest.mark.parametrize("fits", [True, False])
def test_plans_of_which_all_or_none_fit_are_drawn(write_run, fits: bool):
    plan = {"fits": {"host_budget": fits}}
    write_run(status="planned", losses=None, plan=plan, memory__rss_gib=3.0)
    assert files(draw(rows(write_run))) == ["compare_memory.png"]


@pytest.mark.parametrize("wanted", [[5.0, 5.0, 5.0], [95.0, 95.0, 10.0], [50.0, 40.0, 45.0]])
def test_labels_at_the_ends_of_lines_are_spread(wanted: list[float]):
    centres = spread(wanted, [20.0] * 3, 0.0, 100.0)
    ordered = sorted(centres)
    assert ordered[0] >= 10
    assert ordered[-1] <= 90
    assert all(after - before >= 20 - 1e-9 for before, after in itertools.pairwise(ordered))
    assert [centres[i] for i in sorted(range(3), key=lambda i: wanted[i])] == ordered
