"""The basis of all figures: size, style, names in lines, and axes for wide ranges."""

from __future__ import annotations

import matplotlib
import pytest

from training.comparison.canvas import DPI, LONGEST, WIDTH_IN, canvas, fix_layout, in_lines, png, scale_for_range, style


def test_a_figure_has_its_size_and_is_the_same_png_on_every_call():
    figure, _ = canvas(3.0)
    content = png(figure)
    assert content.startswith(b"\x89PNG")
    assert content == png(figure)
    width, height = (int.from_bytes(content[i : i + 4], "big") for i in (16, 20))
    assert (width, height) == (WIDTH_IN * DPI, 3.0 * DPI)


def test_the_style_overrides_the_users_and_is_undone():
    before = matplotlib.rcParams["font.size"]
    with matplotlib.rc_context({"axes.facecolor": "black", "font.size": before + 1}):
        with style():
            assert matplotlib.rcParams["axes.facecolor"] == matplotlib.rcParamsDefault["axes.facecolor"]
            assert not matplotlib.rcParams["text.parse_math"]
        assert matplotlib.rcParams["font.size"] == before + 1


def test_names_break_into_lines_and_long_words_lose_their_middle():
    assert in_lines("layer_stream slots=3 resident=60%", 20) == "layer_stream slots=3\nresident=60%"
    cut = in_lines("a" * 100 + "b" * 100, 1000)
    assert len(cut) == LONGEST
    assert cut.strip("a").strip("b") == "\N{HORIZONTAL ELLIPSIS}"


def test_names_of_foreign_characters_are_drawn_as_escapes():
    name = "a\x1b[2J \ud800 \udcff \u202eb"
    assert in_lines(name, 100) == r"a\x1b[2J \ud800 \xff \u202eb"
    figure, axes = canvas(3.0)
    axes.set_title(in_lines(name, 100))
    assert png(figure).startswith(b"\x89PNG")


@pytest.mark.parametrize(("values", "scale"), [([100.0, 399.0], "linear"), ([100.0, 401.0], "log")])
def test_a_wide_range_is_logarithmic(values: list[float], scale: str):
    _, axes = canvas(3.0)
    axes.plot([1, 2], values)
    scale_for_range(axes, values)
    assert axes.get_yscale() == scale


def test_a_fixed_layout_does_not_move():
    figure, axes = canvas(3.0)
    fix_layout(figure)
    before = axes.bbox.extents.tolist()
    axes.text(-1.0, 0.5, "far outside")
    figure.canvas.draw()
    assert axes.bbox.extents.tolist() == before


@pytest.mark.parametrize(("height_in", "dpi"), [(5.0, DPI), (1000.0, 32.768)])
def test_a_figure_of_any_height_has_few_enough_pixels_to_be_drawn(height_in: float, dpi: float):
    figure, _ = canvas(height_in)
    assert figure.dpi == dpi
    assert figure.bbox.height < 2**16
