"""Drawn pictures with captions, and runs that train a tiny pipeline on them."""

from pathlib import Path

from PIL import Image, ImageDraw

from tests.training.helpers.in_process import TINY_RUN

COLOURS = ("red", "green", "blue")
# Of the tiny pipelines, those whose networks predict noise.
NOISE = ("sdxl", "pixart", "stable_diffusion")


def draw_pictures(folder: Path, count: int = 6) -> Path:
    """Writes pictures of two shapes, with captions of different lengths; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(count):
        size = (64, 64) if number % 2 else (96, 48)
        picture = Image.new("RGB", size, COLOURS[number % 3])
        ImageDraw.Draw(picture).ellipse((4, 4, 20 + 4 * number, 40), fill="white")
        picture.save(folder / f"{number}.png")
        (folder / f"{number}.txt").write_text(f"a white ball on {COLOURS[number % 3]}" + " and more" * (number % 3))
    return folder


def overrides_of(pipeline: Path, pictures: Path, task: str = "flow_matching") -> list[str]:
    """Returns the overrides of a short run."""
    run = [each for each in TINY_RUN if not each.startswith(("model.", "dataset=", "seq_len", "batch_size"))]
    return [
        *run, "model=pipeline", f"model.source={pipeline}", f"task={task}", "dataset=captioned",
        f"dataset.folder={pictures}", "dataset.size=64", "dataset.multiple=32", "batch_size=2", "steps=2",
        "log_every=1",
    ]  # fmt: skip


def given(name: str, pipeline: Path, pictures: Path, *others: str) -> list[str]:
    """Returns the overrides of a short run of the tiny pipeline `name`, in the folder `pipeline`, under its task."""
    task = "noise_prediction" if name in NOISE else "flow_matching"
    return [*overrides_of(pipeline, pictures, task), *others]
