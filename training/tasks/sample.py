"""Samples: what a model made, as files, rows of samples.jsonl and entries of wandb show it."""

from __future__ import annotations

import io
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from training.runs.files import SAMPLES_FOLDER
from training.runs.whole_file import write_whole


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
