"""Samples write files, and wandb gets them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from training.tasks.sample import ImageSample, TextSample


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
