"""Samples write files, and wandb gets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from training.tasks.sample import GREY, ImageSample, TextSample, grid_of, to_uint8


def test_a_text_is_a_row_alone(tmp_path: Path):
    sample = TextSample("a", "ab")
    assert sample.write(tmp_path, 3) == {"prompt": "a", "text": "ab"}
    assert not list(tmp_path.iterdir())


def test_a_picture_is_a_file_that_its_row_names(tmp_path: Path):
    picture = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    sample = ImageSample(picture, "letters")
    row = sample.write(tmp_path, 20)
    assert row == {"caption": "letters", "picture": tmp_path / "samples" / "step-000020.png"}
    assert np.array_equal(np.asarray(Image.open(row["picture"])), picture)
    assert [path.name for path in (tmp_path / "samples").iterdir()] == ["step-000020.png"]


def test_levels_from_black_to_white_are_cut_off_and_channels_come_last() -> None:
    images = torch.tensor([[-3.0, -1.0, -0.5], [0.5, 1.0, 7.0]]).view(1, 2, 1, 3)
    assert to_uint8(images).tolist() == [[[[0, 191], [0, 255], [64, 255]]]]


@pytest.mark.parametrize(("count", "shape"), [(1, (4, 5, 3)), (4, (7, 9, 3)), (5, (7, 13, 3))])
def test_the_grid_is_nearly_square(count: int, shape: tuple[int, ...]) -> None:
    assert grid_of(torch.zeros(count, 2, 3, 1, dtype=torch.uint8)).shape == shape


def test_images_stand_row_by_row_between_lines() -> None:
    picture = grid_of(torch.arange(1, 4, dtype=torch.uint8).view(3, 1, 1, 1))
    assert picture[..., 0].tolist() == [
        [GREY] * 5,
        [GREY, 1, GREY, 2, GREY],
        [GREY] * 5,
        [GREY, 3, GREY, GREY, GREY],
        [GREY] * 5,
    ]
