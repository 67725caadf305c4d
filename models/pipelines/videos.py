"""Videos: whether a pipeline of diffusers makes them, of how many frames, and which rate it tells its network."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from models.json_files import read_object
from models.pipelines.encoded import INDEX
from models.quiet_imports import without_remarks

# The argument of a pipeline for the number of frames, and those for their rate.
COUNT, RATES = "num_frames", ("frame_rate", "fps")


def check_makes_videos(folder: Path) -> None:
    """Raises ValueError in one line if the pipeline in `folder` makes pictures alone."""
    name, parameters = _called_with(folder)
    if COUNT not in parameters:
        raise ValueError(f"{name} makes pictures and no videos")


def rate_of(folder: Path) -> float | None:
    """Returns the frames in a second that the pipeline in `folder` tells its network; None: it does not."""
    _, parameters = _called_with(folder)
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


def _called_with(folder: Path) -> tuple[str, Any]:
    """Returns the name of a pipeline's class, and the parameters of its call."""
    name = read_object(folder / INDEX, "download the pipeline again")["_class_name"]
    with without_remarks():
        import diffusers

        return name, inspect.signature(getattr(diffusers, name).__call__).parameters
