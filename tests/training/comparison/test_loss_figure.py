"""The figure of losses: which runs share a line, where lines end, and the legend."""

from __future__ import annotations

import itertools
import math

import pytest

from training.comparison.loss_figure import accuracy_figure, distinct_curves, loss_figure

NAN = math.nan


def legend_texts(figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text().replace("\n", " ") for text in legend.get_texts()]


def test_equal_curves_share_a_line(write_run):
    write_run("none", losses=(4.0, 3.0))
    write_run("layer_stream", losses=(4.0, 3.0))
    write_run("tensor_swap", losses=(4.0, math.nextafter(3.0, 4.0)))
    assert [curve.label.replace("\n", " ") for curve in distinct_curves(write_run.rows())] == [
        "none, layer_stream: equal in every bit",
        "tensor_swap",
    ]


def test_runs_that_repeat_each_other_make_no_curve_of_their_own(write_run):
    write_run("none", losses=(4.0, 3.0))
    write_run("shard_offload", recompute="none", losses=(4.0, 3.0))
    write_run("shard_offload", recompute="block", losses=(4.0, 3.0))
    (curve,) = distinct_curves(write_run.rows())
    assert curve.label.replace("\n", " ") == "none, shard_offload: equal in every bit"


def test_a_curve_is_the_mean_of_its_seeds_in_their_range(write_run):
    write_run(seed=0, losses=(4.0, 2.0, 1.0))
    write_run(seed=1, losses=(6.0, 3.0))
    (curve,) = distinct_curves(write_run.rows())
    assert (curve.steps, curve.mean, curve.low, curve.high) == ([1, 2], [5.0, 2.5], [4.0, 2.0], [6.0, 3.0])


def test_runs_that_repeat_a_seed_count_as_one_in_its_curve(write_run):
    for seed, loss in ((0, 2.0), (0, 4.0), (1, 5.0)):
        write_run(seed=seed, losses=(4.0, loss))
    (curve,) = distinct_curves(write_run.rows())
    assert (curve.mean, curve.low, curve.high) == ([4.0, 4.0], [4.0, 3.0], [4.0, 5.0])


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
def test_a_curve_that_diverged_ends_at_its_last_finite_loss_and_its_label_says_so(write_run, losses, end, note: str):
    write_run(losses=losses)
    (curve,) = distinct_curves(write_run.rows())
    assert (curve.end, curve.label.replace("\n", " ")) == (end, f"none{note}")
    assert legend_texts(loss_figure(write_run.rows())) == [f"none{note}"]


def test_one_loss_that_is_not_finite_is_named_without_a_line(write_run):
    write_run(losses=(NAN,))
    figure = loss_figure(write_run.rows())
    assert legend_texts(figure) == ["none: not finite from step 1"]
    assert list(figure.axes[0].get_xticks()) == []


def test_the_legend_names_curves_in_the_order_in_which_they_end(write_run):
    for slots, last in enumerate((2.0, 3.0, NAN, 1.0)):
        write_run("layer_stream", knobs={"slots": slots}, losses=(last,) if math.isnan(last) else (4.0, last))
    assert [text.split()[1].strip(":") for text in legend_texts(loss_figure(write_run.rows()))] == [
        "slots=2",
        "slots=1",
        "slots=0",
        "slots=3",
    ]


def test_lines_differ_in_colour_or_dashes(write_run):
    for slots in range(20):
        write_run("layer_stream", knobs={"slots": slots}, losses=(4.0, 3.0 + slots))
    lines = loss_figure(write_run.rows()).axes[0].lines
    assert len({(line.get_color(), line.get_linestyle()) for line in lines}) == 20


@pytest.mark.parametrize("files", ["/data/texts/" + "x" * 60 + "/train-*.parquet", ",".join(["y" * 50] * 30)])
def test_names_stay_on_the_figure_and_do_not_cover_each_other(write_run, files: str):
    for slots in range(24):
        top = {"files": files[: 400 - slots % 2]}
        write_run("none", top=top)
        write_run("layer_stream", knobs={"slots": slots}, top=top, losses=(4.0, 2.0 + slots))
    figure = loss_figure(write_run.rows())
    figure.canvas.draw()
    boxes = [text.get_window_extent() for text in figure.legends[0].get_texts()]
    assert all(box.x0 >= 0 and box.x1 <= figure.bbox.x1 for box in boxes)
    assert all(box.y0 >= 0 and box.y1 <= figure.bbox.y1 for box in boxes)
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    assert figure.axes[0].bbox.width > 0.3 * figure.bbox.width


@pytest.mark.parametrize(
    ("tasks", "label"),
    [
        (("training.tasks.causal_lm.CausalLM",) * 2, "training loss, nats a token"),
        (("training.tasks.flow_matching.FlowMatching",) * 2, "training loss, squared error of the velocity"),
        (("training.tasks.causal_lm.CausalLM", "training.tasks.flow_matching.FlowMatching"), "training loss"),
        (("mine.Own",) * 2, "training loss"),
        ((None, None), "training loss"),
    ],
)
def test_the_axis_says_what_the_loss_is(write_run, tasks: tuple[str | None, ...], label: str):
    for slots, task in enumerate(tasks):
        write_run("layer_stream", knobs={"slots": slots}, top={"task": {"_target_": task}} if task else {"task": "x"})
    assert loss_figure(write_run.rows()).axes[0].get_ylabel() == label


def test_accuracies_have_a_figure_of_their_own(write_run):
    write_run("none", losses=(4.0, 3.0), eval__accuracy=0.25)
    write_run("layer_stream", losses=(4.0, 2.0), eval__accuracy=0.25)
    write_run("tensor_swap", losses=(4.0, 2.0), eval__accuracy=0.5)
    (axes,) = accuracy_figure(write_run.rows()).axes
    assert [list(line.get_ydata()) for line in axes.lines] == [[0.25, 0.25], [0.5, 0.5]]
    assert (axes.get_title(), axes.get_ylabel()) == (
        "Accuracy on the held-out split",
        "share of the examples",
    )
