"""Size, style and colours that all figures share.

Figures are shown 800 pixels wide and drawn at twice that size. The colours are those of Okabe and Ito, which
colour-blind readers can tell apart.
"""

import io
import textwrap
from collections.abc import Sequence

import matplotlib
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from training.visible_text import shortened, visible

BLUE, ORANGE, GREEN, GREY, INK = "#0072B2", "#E69F00", "#009E73", "#8C8C8C", "#262626"
LINES = (BLUE, "#D55E00", GREEN, "#CC79A7", ORANGE, "#56B4E9", GREY)
WIDTH_IN, DPI = 8.0, 200
# Pixels of a figure from top to bottom: matplotlib draws fewer than 2**16. A higher figure has fewer in an inch.
MOST_PIXELS = 2**15
# A y axis is logarithmic if its largest value is more than this many times its smallest: else points would overlap.
LOGARITHMIC_FROM = 4.0
LABEL_SIZE = 8.5
# Inches from one line of a label to the next.
LINE_IN = 0.17
# A phone shows the left 55% of a figure until the reader scrolls: lines of a title are no longer.
TITLE_CHARACTERS = 36
# Characters that a figure shows of one word of a name, which may be a path.
LONGEST = 120
STYLE = {
    "font.size": 9.5,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": GREY,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E4E4E4",
    "grid.linewidth": 0.7,
    # A name with two dollar signs is not a formula.
    "text.parse_math": False,
    "axes.prop_cycle": cycler(color=LINES),
}
# The colours of the page in dark mode (`page.STYLE`). The darkest of the lines changes its place with the lightest.
DARK_INK, DARK_PAPER = "#E6EDF3", "#0D1117"
DARK = {
    **dict.fromkeys(("axes.labelcolor", "text.color", "xtick.color", "ytick.color"), DARK_INK),
    **dict.fromkeys(("figure.facecolor", "axes.facecolor", "savefig.facecolor"), DARK_PAPER),
    "grid.color": "#2A313A",
    "axes.prop_cycle": cycler(color=[{LINES[0]: LINES[5], LINES[5]: LINES[0]}.get(colour, colour) for colour in LINES]),
}


def style(dark: bool = False):
    """Returns a context in which figures have the style of this file, whatever the user's own style is."""
    return matplotlib.rc_context(matplotlib.rcParamsDefault | STYLE | (DARK if dark else {}))


def line_colours() -> list[str]:
    """Returns the colours of lines in the style that is set, the one that stands out first."""
    return matplotlib.rcParams["axes.prop_cycle"].by_key()["color"]


def canvas(height_in: float) -> tuple[Figure, Axes]:
    """Makes an empty figure without pyplot, so that it is freed when unused and needs no window system."""
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=min(DPI, MOST_PIXELS / height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, figure.add_subplot()


def png(figure: Figure) -> bytes:
    """Returns the figure as the bytes of a PNG file, the same on every call."""
    content = io.BytesIO()
    figure.savefig(content, format="png", metadata={"Software": None})
    return content.getvalue()


def in_lines(text: str, characters: int = 26) -> str:
    """Breaks a name into lines of at most `characters`; a word longer than LONGEST loses its middle."""
    words = " ".join(shortened(visible(word), LONGEST) for word in text.split())
    return "\n".join(textwrap.wrap(words, characters, break_on_hyphens=False))


def set_title(axes: Axes, title: str) -> None:
    """Gives the figure a title, in lines that a page on a phone shows whole."""
    axes.set_title(in_lines(title, TITLE_CHARACTERS))


def fix_layout(figure: Figure) -> None:
    """Lays the figure out and keeps this layout, so that positions in pixels stay valid."""
    figure.draw_without_rendering()
    figure.set_layout_engine("none")


def scale_for_range(axes: Axes, values: Sequence[float]) -> None:
    """Makes the y axis logarithmic, with plain numbers at its ticks, if `values` are far apart."""
    if max(values) <= LOGARITHMIC_FROM * min(values):
        axes.set_ylim(bottom=0 if min(values) < 0.5 * max(values) else None)
        return
    axes.set_yscale("log")
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))
    axes.yaxis.set_minor_locator(NullLocator())
