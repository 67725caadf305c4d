"""Letters and digits as small grey images: labelled pictures that every machine with matplotlib has."""

import hashlib
from collections.abc import Sequence
from functools import cache, cached_property, lru_cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.data.examples import NumberedExamples
from training.data.packing import random_words
from training.data.pictures import as_images, meta_images
from training.errors import UserError

CHARACTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"
# The fonts of text among those that matplotlib ships; the others have symbols only.
FONTS = (
    "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSans-Oblique.ttf", "DejaVuSans-BoldOblique.ttf",
    "DejaVuSansMono.ttf", "DejaVuSansMono-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf",
    "DejaVuSerif-Italic.ttf", "STIXGeneral.ttf", "STIXGeneralBol.ttf", "STIXGeneralItalic.ttf", "cmr10.ttf",
    "cmss10.ttf", "cmtt10.ttf", "cmb10.ttf",
)  # fmt: skip
# The factor by which letters are drawn larger before they are reduced, which smooths the edges.
OVERSAMPLING = 2
# Shares of the image: the height of a font's line, and the largest changes.
LINE_HEIGHT, SCALING, SHIFT, DEGREES = 0.75, 0.12, 0.06, 8.0
# In the key of random numbers.
VARIATIONS = 0x676C797068
# All characters in all fonts take 256 MiB then.
LARGEST = 256


class Glyphs(NumberedExamples):
    """Characters in the fonts that matplotlib ships, each centred and then varied in size, place and rotation.

    Example k is the same for every seed; the seed decides the order alone. A batch has `images`, float32
    [B, 1, size, size] from -1 (paper) to 1 (ink), and with labels `labels`, int64 [B], the places of the letters in
    `characters`. `num_classes` is the number of characters. conf/dataset/glyphs.yaml explains the keys.

    Raises UserError if a value is out of range, or a font cannot draw a character.
    """

    def __init__(
        self,
        characters: str = CHARACTERS,
        size: int = 32,
        count: int = 50_000,
        variation: float = 1.0,
        labels: bool = True,
        *,
        seed: int,
        batch_size: int,
        eval_share: float = 0.02,
    ):
        if not characters or len(set(characters)) != len(characters):
            raise UserError(f"dataset.characters={characters!r}: must be characters that differ, at least one")
        if not 8 <= size <= LARGEST:
            raise UserError(f"dataset.size={size}: must be at least 8 and at most {LARGEST}")
        if not 0 <= variation <= 4:
            raise UserError(f"dataset.variation={variation}: must be at least 0 and at most 4")
        super().__init__(count, seed=seed, batch_size=batch_size, eval_share=eval_share)
        self.num_classes = len(characters) if labels else None
        self._characters, self._size, self._variation = characters, size, variation
        # Asked once for all: a box in place of a letter would be learnt as that letter.
        for font in FONTS:
            _check_has(font, characters)

    @staticmethod
    def meta_batch(rows: int, *, size: int = 32, labels: bool = True, **_others: object) -> dict[str, Tensor]:
        """Returns a batch of `rows` examples on the meta device, for these keys of the dataset's option."""
        return meta_images(rows, 1, size, size, labels=labels)

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of every character in every font, and of one varied example of each class."""
        digest = hashlib.sha256(f"{self._characters} {self._size} {self._count} {self._variation}".encode())
        for font in FONTS:
            for character in self._characters:
                digest.update(_drawn(font, character, self._size).tobytes())
        numbers = range(min(len(self._characters), self._count))
        digest.update(self.examples(numbers, [0] * len(numbers))["images"].numpy().tobytes())
        return digest.hexdigest()

    def examples(self, numbers: Sequence[int], epochs: Sequence[int]) -> dict[str, Tensor]:
        """Returns `images`, and `labels` if there are any, of these examples: the same in each epoch."""
        images = as_images([self._image(number)[None] for number in numbers])
        if self.num_classes is None:
            return {"images": images}
        return {"images": images, "labels": torch.tensor([number % self.num_classes for number in numbers])}

    def _image(self, number: int) -> np.ndarray:
        """Draws example `number`: uint8 [size, size]."""
        from PIL import Image

        which, *words = random_words(5, VARIATIONS, number)
        # From -1 to 1. Words have 64 bits, and the quotient is exact to 53.
        scale, right, down, turn = (self._variation * (float(word) / 2**63 - 1) for word in words)
        glyph = _drawn(FONTS[int(which) % len(FONTS)], self._characters[number % len(self._characters)], self._size)
        side = len(glyph)
        # From a place in the result to the place in the drawing, both from the centre.
        shrink = 1 / (1 + SCALING * scale)
        angle = np.deg2rad(DEGREES * turn)
        cos, sin = float(np.cos(angle)) * shrink, float(np.sin(angle)) * shrink
        x0 = side / 2 - cos * (side / 2 + SHIFT * side * right) - sin * (side / 2 + SHIFT * side * down)
        y0 = side / 2 + sin * (side / 2 + SHIFT * side * right) - cos * (side / 2 + SHIFT * side * down)
        matrix = (cos, sin, x0, -sin, cos, y0)
        drawing = Image.fromarray(glyph)
        varied = drawing.transform((side, side), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
        return np.asarray(varied.reduce(OVERSAMPLING))


@cache
def _font(name: str, pixels: int):
    from PIL import ImageFont

    # Its own layout: that of Raqm may be missing, and places glyphs otherwise.
    return ImageFont.truetype(_font_file(name), pixels, layout_engine=ImageFont.Layout.BASIC)


def _font_file(name: str) -> str:
    """Returns the path of a font that matplotlib ships. Raises UserError if it is not there."""
    import matplotlib

    file = Path(matplotlib.get_data_path(), "fonts", "ttf", name)
    if not file.is_file():
        raise UserError(f"dataset=glyphs: there is no font {file}: install matplotlib again, from PyPI or conda")
    return str(file)


@lru_cache(maxsize=8192)
def _drawn(font: str, character: str, size: int) -> np.ndarray:
    """Draws a character in the middle of a square, `OVERSAMPLING` times as large: uint8, 0 paper, 255 ink."""
    from PIL import Image, ImageDraw

    side = size * OVERSAMPLING
    face = _font(font, max(int(side * LINE_HEIGHT), 1))
    left, top, right, bottom = face.getbbox(character)
    image = Image.new("L", (side, side))
    # Anchored at whole pixels, where FreeType's results do not depend on fractions.
    place = ((side - (right - left)) // 2 - left, (side - (bottom - top)) // 2 - top)
    ImageDraw.Draw(image).text(place, character, fill=255, font=face)
    return np.asarray(image)


@lru_cache(maxsize=256)
def _check_has(font: str, characters: str) -> None:
    """Raises UserError if the font lacks one of the characters."""
    from matplotlib.ft2font import FT2Font

    known = FT2Font(_font_file(font)).get_charmap()
    for character in characters:
        if ord(character) not in known:
            raise UserError(f"dataset.characters: {character!r} is not in the font {font}; take letters and digits")
