"""Decodes picture files that others made, and cuts a square from each."""

import io
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from training.data.packing import random_words
from training.errors import UserError, as_user_error, first_line
from training.runs.bounded_files import opened

# Where Pillow begins to warn of files that are small and pictures that are not.
MAX_PIXELS = 2**30 // 4 // 3
MAX_FILE_BYTES = 2**28
# Pillow would cut 16 bits and floats off at 255.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
# The tag of EXIF.
ORIENTATION = 0x0112
# How much each pixel of an image counts in the loss, in a batch.
LOSS_MASK = "loss_mask"
# In the key of random numbers.
CROPS = 0x63726F70


def check_ground(ground: str) -> None:
    """Raises UserError unless `ground` is the name of a colour that Pillow knows, or "#rrggbb"."""
    from PIL import ImageColor

    with as_user_error(f"dataset.ground={ground}: ", after='; give a name of CSS (white, black, gray) or "#rrggbb"'):
        if len(ImageColor.getrgb(ground)) != 3:
            raise ValueError("the ground of transparent pictures must be opaque")


def decoded(source: BinaryIO | bytes | Path, name: str, ground: str = "white"):
    """Decodes a picture as `decoded_with_alpha` does, without its alpha: a Pillow image in mode RGB."""
    return decoded_with_alpha(source, name, ground)[0]


def decoded_with_alpha(source: BinaryIO | bytes | Path, name: str, ground: str = "white"):
    """Decodes a picture, upright and with three channels of 8 bits: a Pillow image in mode RGB.

    A transparent picture is laid on `ground`, a colour by name or "#rrggbb": what a file holds below transparent pixels
    is not part of the picture. Of an animation the first picture is taken, of colours with 16 bits the upper 8 bits.

    Returns the picture, and its alpha as an image in mode L, 0 where only the ground is seen; None if it has no alpha.
    Raises UserError with `name` for a file that is damaged, no picture, larger than MAX_PIXELS or MAX_FILE_BYTES, or a
    grey picture of more than 8 bits.
    """
    from PIL import Image, ImageOps

    with opened_picture(source, name) as opened_image:
        image = ImageOps.exif_transpose(opened_image)
        if not image.has_transparency_data:
            return image.convert("RGB"), None
        layer = image.convert("RGBA")
        below = Image.alpha_composite(Image.new("RGBA", layer.size, ground), layer)
        return below.convert("RGB"), layer.getchannel("A")


def upright_size(source: BinaryIO | bytes | Path, name: str) -> tuple[int, int]:
    """Returns height and width of a picture as `decoded` would, from its header. Raises UserError as `decoded` does."""
    with opened_picture(source, name) as image:
        # Of a TIFF, Pillow turns the size when it opens the file.
        turned = image.format != "TIFF" and image.getexif().get(ORIENTATION) in (5, 6, 7, 8)
        return image.size if turned else image.size[::-1]


@contextmanager
def opened_picture(source: BinaryIO | bytes | Path, name: str):
    """Opens a picture whose header is as `decoded` wants it. Raises errors of the block as UserError too."""
    from PIL import Image, UnidentifiedImageError

    try:
        with ExitStack() as stack:
            if isinstance(source, Path):
                source = stack.enter_context(opened(source))
            elif isinstance(source, bytes):
                source = io.BytesIO(source)
            nbytes = source.seek(0, io.SEEK_END)
            source.seek(0)
            if nbytes > MAX_FILE_BYTES:
                raise ValueError(f"it has {nbytes >> 20} MiB, more than {MAX_FILE_BYTES >> 20}")
            image = stack.enter_context(Image.open(source))
            # Known from its header, before anything is decoded.
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            if image.mode in DEEP_MODES:
                raise ValueError(f"its mode is {image.mode}, more than 8 bits a channel: convert it")
            if "transparency" in image.info and any("16" in str(tile.args) for tile in image.tile):
                # Pillow would look for a colour of 16 bits among those of 8.
                raise ValueError("a colour of 16 bits a channel is transparent: convert it to 8 bits")
            yield image
    # For a damaged file, Pillow's decoders raise errors of any type.
    except Exception as error:
        # Pillow would name the object that it read.
        reason = "it has no known format" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise UserError(f"dataset: cannot use the picture {name}: {reason}; repair or remove it") from error


@dataclass(frozen=True)
class Square:
    """Resizes the short side of pictures to `size`, and cuts a square from each.

    `crop` is random or centre; with `flip` a picture is mirrored with probability 1/2. Raises UserError for another
    `crop`, and a `size` that is not from 1 to 8192.
    """

    size: int = 64
    crop: str = "random"
    flip: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.size <= 8192:
            raise UserError(f"dataset.size={self.size}: must be at least 1 and at most 8192 pixels")
        if self.crop not in ("random", "centre"):
            raise UserError(f"dataset.crop={self.crop}: must be random or centre")

    def of(self, image, variation: tuple[int, ...] | None) -> np.ndarray:
        """Returns a square of a Pillow image, uint8 [3, size, size].

        Its place and mirroring are random by the integers `variation` alone; None takes the middle, not mirrored.
        """
        size, (width, height) = self.size, image.size
        short = min(width, height)
        # At least `size`, which rounding might miss.
        resized = max(size, round(width * size / short)), max(size, round(height * size / short))
        left, top = (resized[0] - size) // 2, (resized[1] - size) // 2
        mirrored = False
        if variation is not None:
            right, below, turned = (int(word) for word in random_words(3, CROPS, *variation))
            if self.crop == "random":
                left, top = right % (resized[0] - size + 1), below % (resized[1] - size + 1)
            # The highest bit: the lowest ones of a generator are its worst.
            mirrored = self.flip and bool(turned >> 63)
        levels = np.asarray(cut(image, resized, left, top, (size, size)))
        if mirrored:
            levels = levels[:, ::-1]
        return np.ascontiguousarray(levels.transpose(2, 0, 1))


def cut(image, resized: tuple[int, int], left: int, top: int, size: tuple[int, int]):
    """Resizes a Pillow image to `resized`, (width, height), by a bicubic filter, and cuts out a part.

    Returns the part of `size`, (width, height), whose upper left corner is at `left`, `top`; all in pixels.
    """
    from PIL import Image

    right, below = left + size[0], top + size[1]
    if resized[0] * resized[1] <= MAX_PIXELS:
        return image.resize(resized, Image.Resampling.BICUBIC).crop((left, top, right, below))
    # All of a long and thin picture would fill the memory: the part alone is made.
    across, down = image.width / resized[0], image.height / resized[1]
    box = left * across, top * down, min(right * across, image.width), min(below * down, image.height)
    return image.resize(size, Image.Resampling.BICUBIC, box)


def as_images(squares: list[np.ndarray]) -> Tensor:
    """Returns squares uint8 [C, size, size] as float32 [B, C, size, size] from -1 to 1."""
    return torch.from_numpy(np.stack(squares)).float().div_(127.5).sub_(1)


def meta_images(rows: int, *shape: int, labels: bool) -> dict[str, Tensor]:
    """Returns a batch of pictures on the meta device: `images`, float32 [rows, *shape], and `labels` int64 [rows]."""
    batch = {"images": torch.empty((rows, *shape), device="meta")}
    if labels:
        batch["labels"] = torch.empty(rows, dtype=torch.int64, device="meta")
    return batch
