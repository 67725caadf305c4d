"""The sizes of buckets: pictures of about one shape are cut to one size, so that a batch can have several of them.

The sizes are those of NovelAI ("NovelAI Improvements on Stable Diffusion", 2022), which kohya's scripts have too: about
as many pixels as a square has, and sides that are multiples of a step. With sides from half of the square's to its
double they are NovelAI's at 512, and at 1024 the largest ones of SDXL's (Podell et al. 2023, appendix I).
"""

from __future__ import annotations

from collections.abc import Sequence

from training.errors import UserError

LARGEST = 8192
# So many steps along the side of the square: 64 pixels at 1024. Finer ones would leave few pictures to a bucket.
STEPS = 16


def bucket_sizes(size: int, multiple: int) -> list[tuple[int, int]]:
    """Returns (height, width) of all buckets, in pixels: none has more pixels than a square of edge `size`.

    Sides are multiples of `multiple`; those of others than the square also of a step of size / STEPS, rounded up. No
    side is longer than four times the other, about.

    Raises UserError if `size` is below `multiple`, or above LARGEST.
    """
    if not multiple <= size <= LARGEST:
        raise UserError(
            f"dataset.size={size}: must be at least {multiple}, of which the model needs a multiple, and at most"
            f" {LARGEST} pixels"
        )
    step = -(-size // (STEPS * multiple)) * multiple
    square = size // multiple * multiple
    found = {(square, square)}
    for side in range(-(-size // (2 * step)) * step, 2 * size + 1, step):
        if other := size * size // side // step * step:
            found |= {(side, other), (other, side)}
    return sorted(found)


def nearest_bucket(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the size, (height, width), that cuts off the least of a picture which covers it; of several the largest.

    That is the size with the nearest aspect ratio on a logarithmic scale.
    """

    def whole_to_kept(size: tuple[int, int]) -> float:
        one, other = height * size[1], width * size[0]
        return max(one, other) / min(one, other)

    return min(sizes, key=lambda size: (whole_to_kept(size), -size[0] * size[1], size))
