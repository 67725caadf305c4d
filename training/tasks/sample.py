"""Samples: what a model made, as files, rows of samples.jsonl and entries of wandb show it."""

import io
import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from training.runs.files import SAMPLES_FOLDER, write_whole

# Lines between the images of a grid: their pixels, and their level.
BORDER = 1
GREY = 128


class Sample(ABC):
    """Samples that a model made at one time."""

    @abstractmethod
    def write(self, run_dir: Path, step: int) -> dict[str, str | Path]:
        """Writes the files that it needs, after `step` steps; returns the columns of its row, texts and pictures."""


@dataclass(frozen=True)
class TextSample(Sample):
    """A prompt, and the text that the model made of it, which begins with the prompt."""

    prompt: str
    text: str

    def write(self, run_dir: Path, step: int) -> dict[str, str | Path]:
        return {"prompt": self.prompt, "text": self.text}


@dataclass(frozen=True, eq=False)
class ImageSample(Sample):
    """A picture, uint8 [height, width] or [height, width, 3], and what it shows."""

    picture: np.ndarray
    caption: str

    def write(self, run_dir: Path, step: int) -> dict[str, str | Path]:
        """Writes samples/step-N.png. Raises OSError if it cannot be written."""
        from PIL import Image

        path = run_dir / SAMPLES_FOLDER / f"step-{step:06d}.png"
        path.parent.mkdir(exist_ok=True)
        content = io.BytesIO()
        Image.fromarray(self.picture).save(content, format="PNG")
        write_whole(path, content.getvalue())
        return {"caption": self.caption, "picture": path}


def to_uint8(images: Tensor) -> Tensor:
    """Returns images [n, C, H, W] of -1 to 1 as uint8 [n, H, W, C] on the CPU; values outside are cut off."""
    levels = ((images.float().cpu().clamp(-1, 1) + 1) * 127.5).round()
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def grid_of(images: Tensor) -> np.ndarray:
    """Returns one picture of all images, in nearly as many rows as columns, with grey lines between them.

    `images` are uint8 [n, H, W, 1 or 3]; the picture is uint8 [height, width, 3].
    """
    count, height, width, _ = images.shape
    columns = math.ceil(math.sqrt(count))
    rows = math.ceil(count / columns)
    picture = np.full((rows * (height + BORDER) + BORDER, columns * (width + BORDER) + BORDER, 3), GREY, dtype=np.uint8)
    for number, image in enumerate(images.numpy()):
        row, column = divmod(number, columns)
        top, left = row * (height + BORDER) + BORDER, column * (width + BORDER) + BORDER
        picture[top : top + height, left : left + width] = image
    return picture
