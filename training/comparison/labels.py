"""Labels beside the points of a chart, none over another: which of a few places each one gets."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

Point = tuple[float, float]

# From near to far, in pixels at 100 dots an inch; labels that are farther are tied to their point by a line.
DISTANCES = (8, 16, 26, 38, 52, 68, 86, 106)
NEAR = 20.0
DIRECTIONS = ((1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, 1), (1, -1), (-1, -1))
# Lines are avoided as if they were rows of such boxes.
GRAIN = 3.0
# Letters on letters are worse than letters on a line, and a point that is hidden is worse than both.
LINE_WEIGHT = 0.5
POINT_WEIGHT = 4.0
# What is cut off cannot be read at all.
OUTSIDE_WEIGHT = 4.0
# What is nearer to another point, and not tied to its own, is read as that one's.
MISTAKEN_WEIGHT = 0.5


@dataclass(frozen=True)
class Box:
    """A rectangle in pixels, y upwards."""

    left: float
    bottom: float
    right: float
    top: float

    def overlap(self, other: "Box") -> float:
        """Square pixels that both cover."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return width * height if width > 0 and height > 0 else 0.0

    def nearest(self, point: Point) -> Point:
        """The place in the box, its edge included, that is nearest to the point."""
        return (min(max(point[0], self.left), self.right), min(max(point[1], self.bottom), self.top))

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def place(
    points: Sequence[Point],
    sizes: Sequence[Point],
    frame: Box,
    *,
    marker: float,
    lines: Sequence[tuple[Point, Point]] = (),
    scale: float = 1.0,
) -> list[Box]:
    """A box of each size near its point, inside `frame`, covering as little as possible of points, boxes and lines.

    Greedy: points with close neighbours go first, and each box goes to the nearest place that is free, or else the
    least covered. Sizes and the half width of a marker are in pixels; `scale` is pixels to those of 100 dots an inch.
    """
    solid = [_around(point, marker) for point in points]
    drawn = [box for start, end in lines for box in _grains(start, end, scale)]
    placed: dict[int, Box] = {}
    for i in sorted(range(len(points)), key=lambda i: _crowding(points, i)):
        others = [box for j, box in enumerate(solid) if j != i]
        best, least = None, math.inf
        for box in _places(points[i], sizes[i], scale):
            tie = list(_grains(points[i], box.nearest(points[i]), scale)) if is_far(points[i], box, scale) else []
            covered = (
                sum(box.overlap(other) for other in solid) * POINT_WEIGHT
                + sum(grain.overlap(other) for grain in tie for other in others) * POINT_WEIGHT
                + sum(part.overlap(other) for part in (box, *tie) for other in placed.values())
                + sum(part.overlap(other) for part in (box, *tie) for other in drawn) * LINE_WEIGHT
                + (box.area - box.overlap(frame)) * OUTSIDE_WEIGHT
                + (box.area if not tie and _is_nearer_to_another(points, i, box) else 0.0) * MISTAKEN_WEIGHT
            )
            if covered < least:
                best, least, best_tie = box, covered, tie
            if least == 0:
                break
        placed[i] = best
        drawn += best_tie
    return [placed[i] for i in range(len(points))]


def is_far(point: Point, box: Box, scale: float = 1.0) -> bool:
    """Whether a label in `box` wants a line to its point."""
    return math.dist(point, box.nearest(point)) > NEAR * scale


def _places(point: Point, size: Point, scale: float) -> Iterator[Box]:
    (x, y), (width, height) = point, size
    for distance in DISTANCES:
        for across, up in DIRECTIONS:
            left = x + across * distance * scale + (across - 1) * width / 2
            bottom = y + up * distance * scale + (up - 1) * height / 2
            yield Box(left, bottom, left + width, bottom + height)


def _is_nearer_to_another(points: Sequence[Point], index: int, box: Box) -> bool:
    distances = [math.dist(point, box.nearest(point)) for point in points]
    return distances[index] > min(distances)


def _crowding(points: Sequence[Point], index: int) -> float:
    return min((math.dist(points[index], other) for i, other in enumerate(points) if i != index), default=0.0)


def _around(point: Point, half: float) -> Box:
    return Box(point[0] - half, point[1] - half, point[0] + half, point[1] + half)


def _grains(start: Point, end: Point, scale: float) -> Iterator[Box]:
    count = max(math.ceil(math.dist(start, end) / (2 * GRAIN * scale)), 1)
    for i in range(count + 1):
        part = i / count
        yield _around((start[0] + part * (end[0] - start[0]), start[1] + part * (end[1] - start[1])), GRAIN * scale)
