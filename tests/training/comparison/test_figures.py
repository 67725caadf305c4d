"""The figures: which are drawn, their points, bars and curves, and labels that can be read."""

import itertools
import math

import pytest
from matplotlib.text import Text

from training.comparison import figures
from training.comparison.figures import (
    LONGEST,
    canvas,
    distinct_curves,
    in_lines,
    loss_figure,
    loss_finding,
    memory_figure,
    memory_finding,
    render_figures,
    scale_for_range,
    time_figure,
    time_finding,
    waits,
    widened,
)
from training.runs.files import FIGURES

NAN = math.nan
LONG_NAMES = ["/data/texts/" + "x" * 60 + "/train-*.parquet", ",".join(["y" * 50] * 30)]


def flat(text: str) -> str:
    return text.replace("\n", " ")


def legend_texts(figure) -> list[str]:
    (legend,) = figure.legends
    return [flat(text.get_text()) for text in legend.get_texts()]


def label_boxes(axes):
    axes.figure.canvas.draw()
    # Without the arrows.
    return [Text.get_window_extent(text) for text in axes.texts]


def check_readable(figure, boxes) -> None:
    """Asserts that the boxes of labels are on the figure, and leave room for its axes."""
    assert boxes
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert figure.axes[0].bbox.width > 0.3 * figure.bbox.width


def check_apart(boxes) -> None:
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))


def write_points(write_run, points):
    for slots, (gib, step_ms) in enumerate(points):
        write_run("layer_stream", knobs={"slots": slots}, step_ms=step_ms, memory__vram_peak_gib=gib)


@pytest.mark.parametrize("count", [1, 12])
@pytest.mark.slow
def test_every_figure_is_drawn(write_run, count: int):
    for i in range(count):
        write_run("layer_stream", knobs={"slots": i}, step_ms=10.0 * 2**i, memory__vram_peak_gib=20.0 - i,
                  transfer__stall_ms=3.0, losses=(4.0, 3.0 + i))  # fmt: skip
    drawn = render_figures(write_run.rows())
    assert [*drawn] == [f"{name}.png" for name in FIGURES]
    assert all(content.startswith(b"\x89PNG") for content in drawn.values())


@pytest.mark.parametrize(
    ("run", "names"),
    [
        ({"memory__rss_gib": 0.5, "losses": (NAN, math.inf)}, ["compare_memory.png", "compare_loss.png"]),
        ({"status": "failed", "reason": "lr"}, ["compare_loss.png"]),
        ({"status": "failed", "reason": "lr", "losses": None}, []),
        ({"status": "planned", "losses": None, "memory__rss_gib": 3.0}, ["compare_memory.png"]),
        (
            {"status": "planned", "losses": None, "plan": {"fits": {"host_budget": False}}, "memory__rss_gib": 3.0},
            ["compare_memory.png"],
        ),
    ],
)
def test_a_figure_is_drawn_where_runs_have_what_it_shows(write_run, run: dict, names: list[str]):
    write_run(**run)
    assert list(render_figures(write_run.rows())) == names


@pytest.mark.parametrize(("kind", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml")])
def test_figures_for_papers_are_the_same_on_every_call(write_run, kind: str, start: bytes):
    write_run(memory__rss_gib=3.0, losses=None)
    first, again = (render_figures(write_run.rows(), kind) for _ in range(2))
    assert first == again
    assert first["compare_memory." + kind].startswith(start)


def test_a_run_on_the_cpu_is_no_point_among_those_on_a_gpu(write_run):
    write_run(memory__vram_peak_gib=0.0, memory__rss_gib=0.5, hardware={"device": "cpu"})
    write_run(memory__vram_peak_gib=3.0, memory__rss_gib=0.5, hardware={"device": "cuda:0", "gpu_name": "H200"})
    rows = write_run.rows()
    of_cpu, of_gpu, of_both = (render_figures(some)["compare_memory.png"] for some in (rows[:1], rows[1:], rows))
    assert of_both == of_gpu
    assert of_both != of_cpu


@pytest.mark.parametrize("draw", [memory_figure, pytest.param(time_figure, marks=pytest.mark.slow), loss_figure])
@pytest.mark.parametrize("files", LONG_NAMES)
def test_names_of_any_length_can_be_read(write_run, draw, files: str):
    for slots in range(4 if draw is memory_figure else 24):
        top = {"files": files[: 400 - slots % 2]}
        write_run("none", top=top, memory__vram_peak_gib=31.0, transfer__stall_ms=0.0)
        write_run("layer_stream", knobs={"slots": slots}, top=top, step_ms=100.0 + slots, transfer__stall_ms=2.0,
                  memory__vram_peak_gib=30.0 - slots, losses=(4.0, 2.0 + slots))  # fmt: skip
    figure = draw(write_run.rows())
    figure.canvas.draw()
    labels = figure.legends[0].get_texts() if draw is loss_figure else figure.axes[0].texts
    boxes = [Text.get_window_extent(text) for text in labels]
    check_readable(figure, boxes)
    if draw is not memory_figure:
        check_apart(boxes)
    assert all(label.get_window_extent().x0 >= 0 for label in figure.axes[0].get_yticklabels())


def test_what_is_no_whole_step_that_fits_is_beside_the_front(write_run):
    plan = {"status": "planned", "losses": None, "plan": {"fits": {"vram_budget": False}}}
    write_run("none", **plan, step_ms=100.0, memory__vram_peak_gib=100.0)
    write_run("layer_stream", status="planned", losses=None, step_ms=200.0, memory__vram_peak_gib=20.0)
    write_run("tensor_swap", status="planned", losses=None, step_ms=100.0, memory__vram_peak_gib=2.0)
    rows = write_run.rows()
    rows[2] = type(rows[2])(rows[2].name, [type(run)(**vars(run) | {"forward_only": True}) for run in rows[2].runs],
                            rows[2].statistics)  # fmt: skip
    (axes,) = memory_figure(rows).axes
    assert axes.lines[0].get_xydata().tolist() == [[20.0, 200.0]]
    expected = ["none: does not fit the device", "layer_stream", "tensor_swap: forward only"]
    assert [flat(text.get_text()) for text in axes.texts] == expected
    assert flat(axes.get_title()) == "Planned: layer_stream: 0.20 of the memory and 2.00 of the step time of none"


def test_of_many_points_those_on_the_front_are_named_first(write_run, monkeypatch):
    monkeypatch.setattr(figures, "MOST_NAMED", 3)
    write_points(write_run, [(20.0, 200.0), (21.0, 210.0), (22.0, 220.0), (10.0, 300.0), (30.0, 100.0)])
    (axes,) = memory_figure(write_run.rows()).axes
    assert [text.get_text() for text in axes.texts] == [f"layer_stream slots={slots}" for slots in (0, 3, 4)]


def test_the_bars_name_the_run_that_they_are_compared_with(write_run):
    for offload, step_ms in (("none", 100.0), ("layer_stream", 150.0)):
        for size in (8, 16):
            write_run(offload, step_ms=step_ms * size, transfer__stall_ms=1.0, top={"batch_size": size})
    (axes,) = time_figure(write_run.rows()).axes
    assert [flat(text.get_text()) for text in axes.texts] == [
        "800 ms",
        "1,600 ms",
        "1,200 ms, 1.50 \N{MULTIPLICATION SIGN} none batch_size=8",
        "2,400 ms, 1.50 \N{MULTIPLICATION SIGN} none batch_size=16",
    ]


def test_equal_curves_share_a_line(write_run):
    write_run("none", losses=(4.0, 3.0))
    # Runs that repeat each other.
    write_run("shard_offload", recompute="none", losses=(4.0, 3.0))
    write_run("shard_offload", recompute="block", losses=(4.0, 3.0))
    write_run("tensor_swap", losses=(4.0, math.nextafter(3.0, 4.0)))
    labels = [flat(curve.label) for curve in distinct_curves(write_run.rows())]
    assert labels == ["none, shard_offload: equal in every bit", "tensor_swap"]


def test_a_curve_is_the_mean_of_its_seeds_in_their_range(write_run):
    # Runs that repeat a seed count as one, and the curve has the steps that all seeds logged.
    for seed, losses in ((0, (4.0, 1.0, 1.0)), (0, (4.0, 3.0, 1.0)), (1, (6.0, 3.0))):
        write_run(seed=seed, losses=losses)
    (curve,) = distinct_curves(write_run.rows())
    assert (curve.steps, curve.mean, curve.low, curve.high) == ([1, 2], [5.0, 2.5], [4.0, 2.0], [6.0, 3.0])


@pytest.mark.parametrize(
    ("losses", "end", "note"),
    [
        ((4.0, 3.0, 2.0), (3, 2.0), ""),
        ((4.0, NAN, 2.0), (3, 2.0), ""),
        ((4.0, 3.0, NAN), (2, 3.0), ": not finite from step 3"),
        ((4.0, math.inf, NAN), (1, 4.0), ": not finite from step 2"),
        ((NAN, NAN, NAN), None, ": not finite from step 1"),
        ((NAN,), None, ": not finite from step 1"),
    ],
)
def test_a_curve_that_diverged_ends_at_its_last_finite_loss_and_its_label_says_so(write_run, losses, end, note: str):
    write_run(losses=losses)
    (curve,) = distinct_curves(write_run.rows())
    assert (curve.end, flat(curve.label)) == (end, f"none{note}")
    assert legend_texts(loss_figure(write_run.rows())) == [f"none{note}"]


def test_the_legend_names_curves_in_the_order_in_which_they_end(write_run):
    for slots, last in enumerate((2.0, 3.0, NAN, 1.0)):
        write_run("layer_stream", knobs={"slots": slots}, losses=(last,) if math.isnan(last) else (4.0, last))
    texts = legend_texts(loss_figure(write_run.rows()))
    assert [text.split()[1].strip(":") for text in texts] == ["slots=2", "slots=1", "slots=0", "slots=3"]


@pytest.mark.parametrize(
    ("limits", "values", "expected"),
    [((99.9, 100.3), (100.0, 100.2), (95.09, 105.11)), ((50.0, 100.0), (60.0, 90.0), (50.0, 100.0))],
)
def test_a_small_difference_looks_small(limits, values, expected):
    assert widened(limits, values) == pytest.approx(expected)


def test_names_break_into_lines_and_long_words_lose_their_middle():
    assert in_lines("layer_stream slots=3 resident=60%", 20) == "layer_stream slots=3\nresident=60%"
    cut = in_lines("a" * 100 + "b" * 100, 1000)
    assert len(cut) == LONGEST
    assert cut.strip("a").strip("b") == "\N{HORIZONTAL ELLIPSIS}"


@pytest.mark.parametrize(("values", "scale"), [([100.0, 399.0], "linear"), ([100.0, 401.0], "log")])
def test_a_wide_range_is_logarithmic(values: list[float], scale: str):
    _, axes = canvas(3.0)
    axes.plot([1, 2], values)
    scale_for_range(axes, values)
    assert axes.get_yscale() == scale


VRAM = "memory/vram_peak_gib"


def test_memory_is_that_of_the_row_with_the_least_beside_its_reference(write_run):
    write_run("none", step_ms=100.0, memory__vram_peak_gib=30.0)
    assert memory_finding(write_run.rows(), VRAM) == "none takes the least memory and the least time"
    assert memory_finding(2 * write_run.rows(), VRAM) == "Step time against memory"
    write_run("layer_stream", step_ms=102.0, memory__vram_peak_gib=6.0)
    none, stream = write_run.rows()
    assert memory_finding([stream, none], VRAM) == "layer_stream: 0.20 of the memory and 1.02 of the step time of none"


def test_the_parts_of_a_step_add_up(write_run):
    write_run(step_ms=100.0, transfer__stall_ms=30.0, optimizer__wait_ms=20.0)
    write_run("layer_stream", step_ms=100.0, transfer__stall_ms=90.0, optimizer__wait_ms=20.0)
    assert [waits(row) for row in write_run.rows()] == [(50.0, 30.0, 20.0), (0.0, 90.0, 10.0)]


def test_the_longest_wait_is_named_with_its_cause(write_run):
    write_run("none", step_ms=100.0)
    assert time_finding(write_run.rows()) == "No run waits for copies or for the optimizer"
    write_run("tensor_swap", step_ms=200.0, transfer__stall_ms=50.0)
    assert time_finding(write_run.rows()) == "tensor_swap waits longest: 25% of its step for copies"
    write_run("layer_stream", step_ms=200.0, transfer__stall_ms=40.0, optimizer__wait_ms=40.0)
    found = time_finding(write_run.rows())
    assert found == "layer_stream waits longest: 20% of its step for copies and 20% of its step for the optimizer"


@pytest.mark.parametrize(
    ("last", "finding"),
    [
        ((), "Training loss"),
        ((2.5, 2.5), "All losses are equal in every bit to those of the resident run"),
        ((2.5, 2.0), "1 of 2 runs have the losses of the resident run in every bit; others differ by up to 2.0e-01"),
        ((2.0,), "Losses differ by up to 2.0e-01"),
    ],
)
def test_losses_are_compared_with_the_resident_run(write_run, last: tuple[float, ...], finding: str):
    write_run("none", losses=(4.0, 2.5))
    for slots, loss in enumerate(last):
        write_run("layer_stream", knobs={"slots": slots}, losses=(4.0, loss))
    assert loss_finding(write_run.rows()) == finding
