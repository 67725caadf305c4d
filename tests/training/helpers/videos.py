"""Writes short videos, whose frames are read exactly as they were."""

from pathlib import Path

import numpy as np
from PIL import Image

from tests.training.helpers.captioned import draw_pictures


def drawn_frames(count: int, width: int = 96, height: int = 48) -> list[Image.Image]:
    """Returns pictures of random colours in blocks."""
    levels = np.random.default_rng(count).integers(0, 256, (count, height // 8, width // 8, 3), dtype=np.uint8)
    return [Image.fromarray(frame).resize((width, height), Image.Resampling.NEAREST) for frame in levels]


def write_video(
    path: Path, frames: list[Image.Image], rate: int = 10, codec: str = "ffv1", pixels: str = "bgr0"
) -> None:
    """Writes a video; without loss by the codec ffv1."""
    import av  # Tests of pictures import this module where PyAV is not installed.

    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, pixels
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())


def draw_videos(folder: Path, frames: int) -> Path:
    """Writes pictures and two videos with captions; returns the folder."""
    draw_pictures(folder, 2)
    for number, size in enumerate([(96, 48), (64, 64)]):
        write_video(folder / f"video{number}.mkv", drawn_frames(frames, *size))
        (folder / f"video{number}.txt").write_text(f"blocks of colour {number}")
    return folder
