"""Decoding of pictures: what is accepted, what is refused in one line, and which square is cut."""

import io
import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training.data import pictures
from training.data.pictures import Square, as_images, check_ground, decoded, decoded_with_alpha, upright_size
from training.errors import UserError


def encoded(image: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def gradient(width: int, height: int) -> Image.Image:
    """Red grows to the right, green downwards."""
    levels = np.zeros((height, width, 3), dtype=np.uint8)
    levels[..., 0] = np.arange(width)
    levels[..., 1] = np.arange(height)[:, None]
    return Image.fromarray(levels)


def test_bytes_and_open_files_are_decoded() -> None:
    content = encoded(gradient(5, 4))
    for source in (content, io.BytesIO(content)):
        image = decoded(source, "a.png")
        assert (image.size, image.mode) == ((5, 4), "RGB")
        assert image.getpixel((3, 2)) == (3, 2, 0)


@pytest.mark.parametrize("mode", ["L", "P", "1", "RGBA", "LA", "CMYK"])
def test_every_mode_of_eight_bits_becomes_rgb(mode: str) -> None:
    kind = "TIFF" if mode == "CMYK" else "PNG"
    assert decoded(encoded(gradient(4, 4).convert(mode), kind), "a").mode == "RGB"


RED = (255, 0, 0)
SEE_THROUGH = {
    "RGBA": encoded(Image.new("RGBA", (2, 2), (*RED, 0))),
    "LA": encoded(Image.new("LA", (2, 2), (77, 0))),
    "palette": encoded(Image.new("RGB", (2, 2), RED).quantize(2), transparency=0),
    "palette of several alphas": encoded(Image.new("RGB", (2, 2), RED).quantize(2), transparency=b"\0\x80"),
    "one colour": encoded(Image.new("RGB", (2, 2), RED), transparency=RED),
    "one grey": encoded(Image.new("L", (2, 2), 77), transparency=77),
    "bit": encoded(Image.new("1", (2, 2), 1), transparency=1),
    "GIF": encoded(Image.new("RGB", (2, 2), RED).quantize(2), "GIF", transparency=0),
    "WebP": encoded(Image.new("RGBA", (2, 2), (*RED, 0)), "WEBP", lossless=True, exact=True),
    "TIFF": encoded(Image.new("RGBA", (2, 2), (*RED, 0)), "TIFF"),
}


@pytest.mark.parametrize("kind", SEE_THROUGH)
def test_colour_below_transparent_pixels_is_never_seen(kind: str) -> None:
    for ground, colour in (("white", (255, 255, 255)), ("black", (0, 0, 0)), ("#102030", (16, 32, 48))):
        image, alpha = decoded_with_alpha(SEE_THROUGH[kind], "a", ground)
        assert (image.mode, set(image.get_flattened_data()), set(alpha.get_flattened_data())) == ("RGB", {colour}, {0})
    assert decoded(SEE_THROUGH[kind], "a").getpixel((0, 0)) == (255, 255, 255)


def test_half_transparent_pixels_are_mixed_with_the_ground() -> None:
    drawn = np.random.default_rng(0).integers(0, 256, (16, 16, 4), dtype=np.uint8)
    image, alpha = decoded_with_alpha(encoded(Image.fromarray(drawn)), "a", "#102030")
    share = drawn[..., 3:] / 255
    expected = share * drawn[..., :3] + (1 - share) * [16, 32, 48]
    assert abs(np.asarray(image) - expected).max() <= 1
    assert np.array_equal(np.asarray(alpha), drawn[..., 3])


def test_an_opaque_picture_is_as_it_was() -> None:
    image, alpha = decoded_with_alpha(encoded(gradient(5, 4)), "a", "black")
    assert (image.tobytes(), alpha) == (gradient(5, 4).tobytes(), None)
    with_alpha, alpha = decoded_with_alpha(encoded(gradient(5, 4).convert("RGBA")), "a", "black")
    assert (with_alpha.tobytes(), set(alpha.get_flattened_data())) == (image.tobytes(), {255})


@pytest.mark.parametrize("ground", ["", "whyte", "#12345678", "1,2,3"])
def test_a_ground_that_is_no_opaque_colour_is_refused(ground: str) -> None:
    with pytest.raises(UserError, match=f'^dataset.ground={ground}: .*; give a name of CSS .* or "#rrggbb"$'):
        check_ground(ground)


def deep_png(*levels: int, transparent: bytes = b"") -> bytes:
    """A PNG of one row of pixels of 16 bits a channel, which Pillow reads and does not write."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", len(levels) // 3, 1, 16, 2, 0, 0, 0)
    rows = zlib.compress(b"\0" + struct.pack(f">{len(levels)}H", *levels))
    colour = chunk(b"tRNS", transparent) if transparent else b""
    start = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + colour
    return start + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_of_colours_of_sixteen_bits_the_upper_eight_are_taken() -> None:
    assert decoded(deep_png(0x0102, 0x80FF, 0xFFFF), "a").getpixel((0, 0)) == (1, 0x80, 255)


def test_cmyk_has_no_alpha_and_becomes_rgb() -> None:
    image, alpha = decoded_with_alpha(encoded(Image.new("CMYK", (2, 2), (255, 0, 0, 0)), "TIFF"), "a")
    assert (image.getpixel((0, 0)), alpha) == ((0, 255, 255), None)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG", "TIFF", "WEBP"])
def test_a_picture_on_its_side_is_turned_upright(kind: str, orientation: int, tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / "a"
    path.write_bytes(encoded(gradient(8, 4), kind, exif=exif, **({"lossless": True} if kind == "WEBP" else {})))
    image = decoded(path, "a")
    assert image.size == ((8, 4) if orientation < 5 else (4, 8))
    assert upright_size(path, "a") == image.size[::-1]
    # Where the stored picture's first pixel, which is black, is seen.
    corner = {1: (0, 0), 2: (7, 0), 3: (7, 3), 4: (0, 3), 5: (0, 0), 6: (3, 0), 7: (3, 7), 8: (0, 7)}[orientation]
    assert sum(image.getpixel(corner)) <= 6


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "it has no known format"),
        (b"not a picture", "it has no known format"),
        (encoded(gradient(64, 64), "JPEG")[:500], "truncated"),
        (encoded(gradient(64, 64))[:100], "truncated"),
        (
            encoded(Image.fromarray(np.full((4, 4), 60000, dtype=np.uint16))),
            "its mode is I;16, more than 8 bits a channel",
        ),
        (deep_png(0, 0, 0, transparent=bytes(6)), "a colour of 16 bits a channel is transparent: convert it to 8 bits"),
    ],
)
def test_damaged_pictures_are_refused_in_one_line(content: bytes, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        decoded(content, "folder/a.png")
    message = str(caught.value)
    assert message.startswith("dataset: cannot use the picture folder/a.png: ")
    assert message.endswith("; repair or remove it")
    assert problem in message.replace("Truncated", "truncated")
    assert "\n" not in message


def test_a_decompression_bomb_is_refused_before_it_is_decoded() -> None:
    # Less than a MiB in the file, 1.2 GiB decoded.
    bomb = encoded(Image.new("1", (20_000, 20_000)))
    assert len(bomb) < 2**20
    with pytest.raises(UserError, match=r"a\.png: .*(exceeds limit|more than)"):
        decoded(bomb, "a.png")


@pytest.mark.parametrize(
    ("limit", "value", "problem"),
    [("MAX_PIXELS", 15, "it has 4 x 4 pixels, more than 15"), ("MAX_FILE_BYTES", 10, "it has 0 MiB, more than 0")],
)
def test_what_is_larger_than_a_limit_is_refused(monkeypatch, limit: str, value: int, problem: str) -> None:
    monkeypatch.setattr(pictures, limit, value)
    with pytest.raises(UserError, match=problem):
        decoded(encoded(gradient(4, 4)), "a.png")


def test_the_middle_is_cut_from_the_resized_picture() -> None:
    square = Square(4).of(gradient(10, 4), None)
    assert square.shape == (3, 4, 4)
    assert square[0, 0].tolist() == [3, 4, 5, 6]
    assert square[1, :, 0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [(10, 4), (4, 10), (7, 7), (3, 1000)])
def test_the_short_side_decides(size: tuple[int, int]) -> None:
    assert Square(5).of(gradient(*size), (0, 1)).shape == (3, 5, 5)


def squares(crop: str, flip: bool) -> list[np.ndarray]:
    return [Square(8, crop, flip).of(gradient(40, 8), (0, number, 0)) for number in range(60)]


def test_random_squares_and_mirrors() -> None:
    assert np.array_equal(squares(crop="random", flip=True), squares(crop="random", flip=True))
    rising = [bool(square[0, 0, 0] < square[0, 0, 1]) for square in squares(crop="random", flip=True)]
    assert 15 < sum(rising) < 45
    left_edges = {int(square[0, 0].min()) for square in squares(crop="random", flip=False)}
    assert left_edges <= set(range(33))
    assert len(left_edges) > 15
    assert len({square.tobytes() for square in squares(crop="centre", flip=True)}) == 2
    assert len({square.tobytes() for square in squares(crop="centre", flip=False)}) == 1


def test_levels_become_minus_one_to_one() -> None:
    images = as_images([np.full((3, 2, 2), level, dtype=np.uint8) for level in (0, 51, 255)])
    assert images.shape == (3, 3, 2, 2)
    assert torch.allclose(images[:, 0, 0, 0], torch.tensor([-1.0, -0.6, 1.0]))


@pytest.mark.parametrize("variation", [None, (3,)])
def test_the_square_of_a_long_picture_is_made_alone(variation: tuple | None, monkeypatch: pytest.MonkeyPatch) -> None:
    image = gradient(250, 9)
    whole = Square(6).of(image, variation).astype(int)
    monkeypatch.setattr(pictures, "MAX_PIXELS", 500)
    alone = Square(6).of(image, variation).astype(int)
    # The last bits differ: there the square is cut before it is scaled.
    assert abs(alone - whole).max() <= 1
    # Scaled as a whole this one would take 1.2 TB.
    monkeypatch.undo()
    assert Square(2048).of(Image.new("RGB", (1, 100_000)), (5,)).shape == (3, 2048, 2048)
