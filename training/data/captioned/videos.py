"""Reads the first frames of videos, by PyAV: all, or those of another rate."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from training.data.pictures import opened_picture
from training.errors import UserError, as_user_error
from training.runs.bounded_files import opened

ENDINGS = (".mp4", ".mov", ".mkv", ".webm", ".avi", ".m4v")
# Files of other formats have further pictures that are no frames: pages, gain maps of telephones.
MOVING = (".gif", ".webp", ".png")
# The curves of light of HDR, PQ and HLG, by their numbers in ITU-T H.273: read as others are, their pictures look grey.
HDR = (16, 18)


def is_video(path: Path) -> bool:
    """Tells whether a file has more than one frame. Raises UserError for a picture that cannot be used, or moves."""
    if (ending := path.suffix.lower()) in ENDINGS:
        return True
    with opened_picture(path, str(path)) as image:
        if ending in MOVING and getattr(image, "n_frames", 1) > 1:
            raise UserError(f"dataset: {path} is a moving picture, of which the frames are not read: save it as .mp4")
    return False


def size_and_count(path: Path, fps: float | None) -> tuple[tuple[int, int], int]:
    """Returns (height, width) of a video, upright, and how many frames it has at `fps` (None: all its frames).

    Raises UserError for a file that cannot be used, and without PyAV.
    """
    times = _times(path)
    count = len(times) if fps is None or not times else int((times[-1] - times[0]) * fps + 0.5) + 1
    for first in frames_of(path, min(count, 1), None):
        return first.size[::-1], count
    raise UserError(f"dataset: cannot use the video {path}: it has no frames; repair or remove it")


def frames_of(path: Path, count: int, fps: float | None) -> Iterator[Any]:
    """Yields `count` frames from the beginning, as upright Pillow images in mode RGB.

    With `fps` the frames nearest to the times 0, 1 / fps, 2 / fps, ... in seconds; with None each frame. Raises
    UserError for a file that cannot be used or has fewer frames, and without PyAV.
    """
    wanted = range(count) if fps is None else _nearest(_times(path), count, fps)
    upright = enumerate(_upright_frames(path))
    number, frame = -1, None
    for place in wanted:
        while number < place:
            number, frame = next(upright, (place, None))
        if frame is None:
            raise UserError(f"dataset: the video {path} has fewer than {place + 1} frames; repair or remove it")
        yield frame


def _nearest(times: Sequence[float], count: int, fps: float) -> list[int]:
    """Returns the places of the times that are nearest to 0, 1 / fps, ..., counted from the first."""
    found = np.asarray(times) - times[0]
    return [int(np.abs(found - number / fps).argmin()) for number in range(count)]


def _times(path: Path) -> list[float]:
    """Returns when each frame is shown, in seconds."""
    with _opened(path) as (container, stream):
        packets = [packet for packet in container.demux(stream) if packet.pts is not None and not packet.is_discard]
        return sorted(float(packet.pts * packet.time_base) for packet in packets)


def _upright_frames(path: Path) -> Iterator[Any]:
    with _opened(path) as (container, stream):
        for frame in container.decode(stream):
            # A telephone turns no pixels, and says how they lie.
            yield frame.to_image().rotate(frame.rotation, expand=True)


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """Opens a video with its first stream of pictures. Raises errors of the block as UserError too."""
    try:
        import av
    except ImportError as error:
        raise UserError(f"dataset: the video {path} is read by PyAV: pip install av") from error
    # For a damaged file, decoders raise errors of any type.
    refused = as_user_error(f"dataset: cannot use the video {path}: ", Exception, after="; repair or remove it")
    with refused, opened(path) as file, av.open(file) as container:
        if not container.streams.video:
            raise ValueError("it has no pictures")
        stream = container.streams.video[0]
        if stream.sample_aspect_ratio not in (None, 0, 1):
            raise ValueError(f"its pixels are not square ({stream.sample_aspect_ratio}): convert it")
        if stream.codec_context.color_trc in HDR:
            raise ValueError("its light is that of HDR: convert it to SDR")
        stream.thread_type = "AUTO"
        yield container, stream
