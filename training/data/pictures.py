"""Decodes picture files that others made, and cuts a square from each."""

import io
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np
import torch
from torch import Tensor

from training.data.packing import random_words
from training.errors import UserError, first_line

# Where Pillow begins to warn of files that are small and pictures that are not.
MAX_PIXELS = 2**30 // 4 // 3
MAX_FILE_BYTES = 2**28
# Pillow would cut 16 bits and floats off at 255.
DEEP_MODES = ("I", "F", "I;16", "I;16B", "I;16L", "I;16N")
# In the key of random numbers.
CROPS = 0x63726F70


def decoded(source: BinaryIO | bytes, name: str):
    """Decodes a picture, upright and with three channels of 8 bits: a Pillow image in mode RGB.

    Transparency is left out; of an animation the first picture is taken.

    Raises:
        UserError: one line that names the picture, where it is damaged, is no picture, has more than MAX_PIXELS or
            MAX_FILE_BYTES, or more than 8 bits a channel.
    """
    from PIL import Image, ImageOps, UnidentifiedImageError

    try:
        if isinstance(source, bytes):
            source = io.BytesIO(source)
        nbytes = source.seek(0, io.SEEK_END)
        source.seek(0)
        if nbytes > MAX_FILE_BYTES:
            raise ValueError(f"it has {nbytes >> 20} MiB, more than {MAX_FILE_BYTES >> 20}")
        with Image.open(source) as image:
            # Known from its header, before anything is decoded.
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"it has {image.width} x {image.height} pixels, more than {MAX_PIXELS:,}")
            if image.mode in DEEP_MODES:
                raise ValueError(f"its mode is {image.mode}, more than 8 bits a channel: convert it")
            return ImageOps.exif_transpose(image).convert("RGB")
    # For a damaged file, Pillow's decoders raise errors of any type.
    except Exception as error:
        # Pillow would name the object that it read.
        reason = "it has no known format" if isinstance(error, UnidentifiedImageError) else first_line(error)
        raise UserError(f"dataset: cannot use the picture {name}: {reason}; repair or remove it") from error


@dataclass(frozen=True)
class Square:
    """Resizes the short side of pictures to `size`, and cuts a square from each.

    Attributes:
        crop: "random" for a square that depends on the variation, or "centre" for the middle.
        flip: whether every second picture is mirrored.

    Raises UserError if a value is out of range.
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
        """Returns the square of a Pillow image: uint8 [3, size, size].

        Place and mirroring depend on the integers of `variation` alone. None takes the middle, as it is.
        """
        from PIL import Image

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
        if resized[0] * resized[1] <= MAX_PIXELS:
            image = image.resize(resized, Image.Resampling.BICUBIC).crop((left, top, left + size, top + size))
        else:
            # All of a long and thin picture would fill the memory: the square alone is made.
            across, down = width / resized[0], height / resized[1]
            box = left * across, top * down, min((left + size) * across, width), min((top + size) * down, height)
            image = image.resize((size, size), Image.Resampling.BICUBIC, box)
        levels = np.asarray(image)
        if mirrored:
            levels = levels[:, ::-1]
        return np.ascontiguousarray(levels.transpose(2, 0, 1))


def as_images(squares: list[np.ndarray]) -> Tensor:
    """Returns squares uint8 [C, size, size] as float32 [B, C, size, size] from -1 to 1."""
    return torch.from_numpy(np.stack(squares)).float().div_(127.5).sub_(1)


def meta_images(rows: int, *shape: int, labels: bool) -> dict[str, Tensor]:
    """Returns a batch of pictures on the meta device: `images`, float32 [rows, *shape], and `labels` int64 [rows]."""
    batch = {"images": torch.empty((rows, *shape), device="meta")}
    if labels:
        batch["labels"] = torch.empty(rows, dtype=torch.int64, device="meta")
    return batch
