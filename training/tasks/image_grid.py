"""Images as pictures: values of a model to bytes, and many images to one grid."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

BORDER = 1
GREY = 128


def to_uint8(images: Tensor) -> Tensor:
    """Returns images [n, C, H, W] of -1 to 1 as uint8 [n, H, W, C] on the CPU; values outside are cut off."""
    levels = ((images.float().cpu().clamp(-1, 1) + 1) * 127.5).round()
    return levels.to(torch.uint8).permute(0, 2, 3, 1).contiguous()


def grid_of(images: Tensor) -> np.ndarray:
    """Returns images uint8 [n, H, W, 1 or 3] row by row in one picture, nearly square: uint8 [height, width, 3].

    Grey lines divide the images.
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
