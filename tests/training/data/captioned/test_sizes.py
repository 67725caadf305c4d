"""Sizes of buckets: those of NovelAI and SDXL, multiples, and the one that cuts off the least."""

import math

import pytest

from training.data.captioned.sizes import bucket_sizes, nearest_bucket
from training.errors import UserError


def kohyas(largest_area: int, smallest: int, largest: int, step: int) -> set[tuple[int, int]]:
    """The sizes of `make_bucket_resolutions` of kohya's scripts, which follow NovelAI's description."""
    sizes = {(math.isqrt(largest_area) // step * step,) * 2}
    for side in range(smallest, largest + 1, step):
        other = min(largest, largest_area // side // step * step)
        sizes |= {(side, other), (other, side)}
    return sizes


@pytest.mark.parametrize("size", [512, 1024])
@pytest.mark.parametrize("multiple", [8, 16, 32, 64])
def test_sizes_are_kohyas_at_their_limits(size: int, multiple: int) -> None:
    step = max(multiple, size // 16)
    assert set(bucket_sizes(size, multiple)) == kohyas(size**2, size // 2, 2 * size, step)


def test_at_1024_all_but_the_smaller_of_two_sizes_are_sdxls() -> None:
    sizes = bucket_sizes(1024, 8)
    # Of the table in appendix I of the SDXL paper.
    for pair in [
        (512, 2048),
        (512, 1856),
        (576, 1792),
        (640, 1536),
        (704, 1408),
        (768, 1344),
        (832, 1216),
        (896, 1152),
    ]:
        assert pair in sizes
        assert pair[::-1] in sizes
    assert (1024, 1024) in sizes


@pytest.mark.parametrize(
    ("size", "multiple"), [(16, 16), (17, 16), (64, 16), (100, 8), (1000, 8), (768, 28), (2048, 32)]
)
def test_sides_are_multiples_and_no_size_has_more_pixels(size: int, multiple: int) -> None:
    sizes = bucket_sizes(size, multiple)
    assert (size // multiple * multiple,) * 2 in sizes
    assert {(width, height) for height, width in sizes} == set(sizes)
    for height, width in sizes:
        assert height * width <= size**2
        assert height % multiple == width % multiple == 0
        assert min(height, width) > 0


@pytest.mark.parametrize("size", [15, 0, 8193])
def test_a_size_out_of_range_is_refused(size: int) -> None:
    with pytest.raises(UserError, match=f"^dataset.size={size}: must be at least 16, .* at most 8192 pixels$"):
        bucket_sizes(size, 16)


def test_the_nearest_bucket_keeps_most_of_a_picture() -> None:
    sizes = bucket_sizes(512, 64)

    def kept(height: int, width: int, size: tuple[int, int]) -> float:
        scale = max(size[0] / height, size[1] / width)
        return size[0] * size[1] / (height * width * scale**2)

    for height, width in [(100, 100), (300, 200), (1080, 1920), (4000, 300), (511, 513), (7, 5)]:
        nearest = nearest_bucket(height, width, sizes)
        assert kept(height, width, nearest) == pytest.approx(max(kept(height, width, size) for size in sizes))
        assert nearest_bucket(width, height, sizes) == nearest[::-1]


def test_of_sizes_that_keep_as_much_the_largest_is_taken() -> None:
    assert nearest_bucket(10, 10, [(64, 64), (512, 512), (128, 128)]) == (512, 512)
