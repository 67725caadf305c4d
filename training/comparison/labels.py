"""Places labels beside the points of a figure, each where nothing else is."""

import math
from collections.abc import Sequence

import numpy
from matplotlib.axes import Axes
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

# Pixels from a point to its label: of 16 directions at each, nearest first, the first free place is taken.
DISTANCES = (16, 32, 56, 90, 140, 200, 280, 380)
# Pixels around a point whose content is not in the way of its arrow.
NEAR = 24.0
# The arrows between points and labels, for `Axes.annotate`.
ARROW = {"arrowstyle": "-", "linewidth": 0.6, "zorder": 2.5, "shrinkA": 0, "shrinkB": 5}


def place_labels(axes: Axes, labels: Sequence[Annotation], boxes: Sequence[Bbox], line: numpy.ndarray) -> None:
    """Moves each label beside the point that it annotates, to which its arrow leads.

    A label covers none of `boxes` in pixels, not the `line` through points of the data, and no other label or arrow. If
    the axes have no such place, it covers as few of these as possible.
    """
    taken, lines = [*boxes], [Path(axes.transData.transform(line))]
    angles = numpy.arange(16) * math.pi / 8
    around = numpy.stack([numpy.cos(angles), numpy.sin(angles)], 1)
    for label in labels:
        point = axes.transData.transform(label.xy)
        half = numpy.array(Text.get_window_extent(label).size) / 2
        # The middle of an edge of the label, or its corner, is next to the point.
        near = half * numpy.clip(around * math.sqrt(2), -1, 1)
        best, least = (), math.inf
        for centre in (place for distance in DISTANCES for place in point + near + distance * around):
            box, way = Bbox([centre - half, centre + half]), centre - point
            arrow = Path([point + way * min(NEAR / numpy.hypot(*way), 1), centre])
            cost = box.count_overlaps(taken) + sum(each.intersects_bbox(box, filled=False) for each in lines)
            cost += sum(arrow.intersects_bbox(each, filled=False) for each in taken)
            cost += 1000 * ((box.min < axes.bbox.min).any() or (box.max > axes.bbox.max).any())
            if cost < least:
                best, least = (centre, box, arrow), cost
            if not least:
                break
        centre, box, arrow = best
        # Beside its point a label needs none.
        gap = numpy.maximum(abs(centre - point) - half, 0)
        label.arrow_patch.set_visible(bool(numpy.hypot(*gap) > 1.5 * DISTANCES[0]))
        label.set(position=axes.transData.inverted().transform(centre), ha="center", va="center", zorder=4)
        taken.append(box)
        lines.append(arrow)
