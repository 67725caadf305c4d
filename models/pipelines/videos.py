"""Tells from a pipeline of diffusers whether it makes videos, of how many frames, at which rate."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from models.json_files import read_object
from models.pipelines.encoded import INDEX
from models.quiet_imports import without_remarks

# The arguments of pipelines for the number of frames (the others of Sana and Latte), and for their rate.
COUNTS, RATES = ("num_frames", "frames", "video_length"), ("frame_rate", "fps")
# That for the part of a picture, which SDXL tells its network.
CROP = "crops_coords_top_left"


def check_makes_videos(folder: Path) -> None:
    """Raises ValueError in one line if the pipeline in `folder` makes pictures alone."""
    if not called_with(folder).keys() & {*COUNTS}:
        raise ValueError(f"{_class_name(folder)} makes pictures and no videos")


def rate_of(folder: Path) -> float | None:
    """Returns the frames in a second that the pipeline in `folder` tells its network; None: it does not."""
    parameters = called_with(folder)
    return next((float(parameters[name].default) for name in RATES if name in parameters), None)


def check_frames(pipeline: Any, frames: int) -> None:
    """Raises ValueError in one line unless the VAE of `pipeline` makes whole latents of so many frames."""
    name = type(pipeline).__name__
    factors = [value for key, value in vars(pipeline).items() if key.startswith("vae_") and "temporal" in key]
    if not factors:
        raise ValueError(f"{name} has no VAE of videos")
    if over := (frames - 1) % factors[0]:
        nearest = [number for number in (frames - over, frames - over + factors[0]) if number > 1]
        raise ValueError(
            f"{name} takes a multiple of {factors[0]} plus 1: give dataset.frames={' or '.join(map(str, nearest))}"
        )


def called_with(folder: Path) -> Mapping[str, inspect.Parameter]:
    """Returns the parameters of the call of the pipeline in `folder`, by name."""
    with without_remarks():
        import diffusers

        return inspect.signature(getattr(diffusers, _class_name(folder)).__call__).parameters


def _class_name(folder: Path) -> str:
    return read_object(folder / INDEX, "download the pipeline again")["_class_name"]
