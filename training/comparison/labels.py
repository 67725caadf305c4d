"""Places labels beside the points of a figure, each where nothing else is."""

import math
from collections.abc import Sequence
from itertools import pairwise

import numpy
from matplotlib.axes import Axes
from matplotlib.text import Annotation, Text

# Pixels from a point to its label: of 16 directions at each, nearest first, the first free place is taken.
DISTANCES = (16, 32, 56, 90, 140, 200, 280, 380)
# Pixels between two points of a line that labels avoid; shorter than any label is high.
SPACING = 12.0
# The arrows between points and labels, for `Axes.annotate`.
ARROW = {"arrowstyle": "-", "linewidth": 0.6, "zorder": 2.5, "shrinkA": 0, "shrinkB": 5}


def place_labels(axes: Axes, labels: Sequence[Annotation], boxes: Sequence[numpy.ndarray], line: numpy.ndarray) -> None:
    """Moves each label beside the point that it annotates, to which its arrow leads.

    A label covers none of `boxes` (x0, y0, x1, y1 in pixels), not the `line` through points of the data, and no other
    label or arrow. If the axes have no such place, it covers as few of these as possible.
    """
    taken = [*boxes, *_dots(axes.transData.transform(line))]
    for label in labels:
        point = axes.transData.transform(label.xy)
        half = numpy.array(Text.get_window_extent(label).size) / 2
        best, least = (point, [], []), math.inf
        for centre in _places(point, half):
            box = numpy.array([*(centre - half), *(centre + half)])
            outside = (box[:2] < axes.bbox.min).any() or (box[2:] > axes.bbox.max).any()
            # What is at the point itself is not in the way of its line.
            dots = [dot for dot in _dots([point, centre]) if math.dist(dot[:2], point) > 2 * SPACING]
            cost = 1000 * outside + _overlaps([box], taken) + (_overlaps(dots, taken) if dots else 0)
            if cost < least:
                best, least = (centre, box, dots), cost
            if not least:
                break
        centre, box, dots = best
        # Beside its point a label needs none.
        gap = numpy.maximum(abs(centre - point) - half, 0)
        label.arrow_patch.set_visible(bool(numpy.hypot(*gap) > 1.5 * DISTANCES[0]))
        label.set(position=axes.transData.inverted().transform(centre), ha="center", va="center", zorder=4)
        taken += [box, *dots]


def _places(point: numpy.ndarray, half: numpy.ndarray) -> list[numpy.ndarray]:
    angles = numpy.arange(16) * math.pi / 8
    around = numpy.stack([numpy.cos(angles), numpy.sin(angles)], 1)
    # The middle of an edge of the label, or its corner, is next to the point.
    near = half * numpy.clip(around * math.sqrt(2), -1, 1)
    return [place for distance in DISTANCES for place in point + near + distance * around]


def _dots(corners: Sequence[numpy.ndarray]) -> list[numpy.ndarray]:
    """Returns points along the line through `corners`, at most SPACING pixels apart, as boxes without a size."""
    dots = []
    for start, end in pairwise(corners):
        dots += list(numpy.linspace(start, end, 2 + int(math.dist(start, end) / SPACING)))
    return [numpy.array([*dot, *dot]) for dot in dots]


def _overlaps(boxes: Sequence[numpy.ndarray], others: Sequence[numpy.ndarray]) -> int:
    """Returns how many of `others` overlap one of `boxes`."""
    own, them = numpy.array(boxes)[:, None], numpy.array(others)[None]
    apart = (own[..., :2] > them[..., 2:]) | (own[..., 2:] < them[..., :2])
    return int((~apart.any(-1)).any(0).sum())
