"""Finds pictures and videos with captions, and cuts each to the size of its bucket, with its mask for the loss."""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import splitext

import numpy as np
import torch
from torch import Tensor

from training.data.captioned import videos
from training.data.captioned.captions import BESIDE, captions_below
from training.data.captioned.columns import ColumnPicture
from training.data.images import EXTENSIONS, existing_folder, files_below
from training.data.packing import random_words
from training.data.pictures import CROPS, as_images, cut, decoded_with_alpha, upright_size
from training.errors import UserError, as_user_error
from training.runs.bounded_files import DamagedError, opened

MASK = "-mask.png"
# Pictures which not every Pillow decodes; to leave them out would train on a part of the folder in silence.
OTHER_PICTURES = (".avif", ".heic", ".heif", ".jxl")
LARGEST = 8192
# The sides of buckets are multiples of size / STEPS: 64 pixels at size 1024. With more steps buckets would have few
# pictures each.
STEPS = 16
# The name of a folder with its repeats, as kohya's scripts expect it, such as 10_cat.
COUNTED = re.compile(r"\d+_")


@dataclass(frozen=True)
class CaptionedPicture:
    """A picture in a folder or in a column of a dataset, or a video in a folder. An epoch shows it `repeats` times.

    `size` is (height, width) of its bucket in pixels, for a video (frames, height, width). `original_size` is
    (height, width) of the upright picture before it is resized. `mask_path` is the file NAME-mask.png beside the
    picture NAME, if there is one.
    """

    path: Path | ColumnPicture
    caption: str
    repeats: int
    size: tuple[int, ...]
    original_size: tuple[int, int]
    mask_path: Path | None


@dataclass(frozen=True)
class Cropped:
    """A picture that is resized and cut for the model.

    `pixels` are float32 [3, H, W] from -1 to 1, of a video [3, frames, H, W]. `mask` says how much each pixel counts in
    the loss, float32 [1, H, W] from 0 to 1; None: all alike. `crop` is (top, left) of the cut, in pixels (`crop_of`).
    """

    pixels: Tensor
    mask: Tensor | None
    crop: tuple[int, int]


def find_pictures(
    folders: Mapping[Path, int], *, size: int, multiple: int, frames: int | None = None, fps: float | None = None
) -> list[CaptionedPicture]:
    """Returns the pictures and videos below `folders`, {folder: repeats}: folder by folder, sorted by path in each.

    Reads captions and the headers of files. `size` and `multiple` are those of `bucket_sizes`, `fps` is that of
    `videos.frames_of`; `frames` are taken of each video, None refuses videos. Raises UserError if there are no
    pictures, a video has too few frames, a picture has no caption or cannot be used, or a mask has another size than
    its picture.
    """
    sizes = bucket_sizes(size, multiple)
    return [each for folder, repeats in folders.items() for each in _in_folder(folder, repeats, sizes, frames, fps)]


def in_buckets(found: Iterable[tuple[ColumnPicture, str]], *, size: int, multiple: int) -> list[CaptionedPicture]:
    """Returns the pictures of a dataset's column, `found` with their captions, each with its bucket and no mask.

    `size` and `multiple` are those of `bucket_sizes`. Raises UserError for a picture that cannot be used.
    """
    sizes, pictures = bucket_sizes(size, multiple), []
    for path, caption in found:
        original_size = upright_size(path.read(), str(path))
        size = nearest_bucket(*original_size, sizes)
        pictures.append(CaptionedPicture(path, caption, 1, size, original_size, None))
    return pictures


def _in_folder(
    folder: Path, repeats: int, sizes: list[tuple[int, int]], frames: int | None, fps: float | None
) -> Iterator[CaptionedPicture]:
    files = files_below(folder, EXTENSIONS + videos.ENDINGS)
    # A caption tells that a file of any other kind is a picture.
    captioned = {splitext(name)[0] for name in files_below(folder, BESIDE)} - {splitext(name)[0] for name in files}
    for name in files_below(folder, ("",)):
        stem, ending = splitext(name)
        if ending.lower() in OTHER_PICTURES or (stem in captioned and ending.lower() not in BESIDE):
            raise UserError(
                f"dataset.folder={folder}: {name} is of a kind that is not read: save it as .png, or move it out of the"
                " folder"
            )
    if frames is None and (unread := files_below(folder, videos.ENDINGS)):
        raise UserError(
            f"dataset.folder={folder}: {unread[0]} is a video: give dataset.frames=N, how many are taken of each, for a"
            " pipeline of videos; or move it out of the folder"
        )
    masks = frozenset(_mask_of(file) for file in files).intersection(files)
    pictures, short = [file for file in files if file not in masks], []
    if not pictures:
        raise UserError(f"dataset.folder={folder}: no pictures in it; they end in {', '.join(EXTENSIONS)}")
    for picture, caption in zip(pictures, captions_below(folder, pictures), strict=True):
        path, mask = folder / picture, _mask_of(picture)
        mask_path = folder / mask if mask in masks else None
        moving = frames is not None and videos.is_video(path)
        if moving:
            original_size, count = videos.size_and_count(path, fps)
            if count < frames:
                short.append(f"{picture} with {count}")
        else:
            original_size = upright_size(path, str(path))
        if mask_path and (of_mask := upright_size(mask_path, str(mask_path))) != original_size:
            shown = [f"{width} x {height}" for height, width in (of_mask, original_size)]
            raise UserError(f"dataset: the mask {mask_path} has {shown[0]} pixels, its picture {shown[1]}: resize it")
        size = nearest_bucket(*original_size, sizes)
        yield CaptionedPicture(path, caption, repeats, (frames, *size) if moving else size, original_size, mask_path)
    if short:
        raise UserError(
            f"dataset.frames={frames}: {len(short)} videos below {folder} have fewer, the first is {short[0]}: take"
            " fewer frames, or move these out of the folder"
        )


def _mask_of(picture: str) -> str:
    return str(Path(picture).with_suffix("")) + MASK


def cropped(
    picture: CaptionedPicture,
    *,
    flip: bool,
    ground: str,
    alpha_mask: bool,
    fps: float | None = None,
    variation: tuple[int, ...] | None = None,
) -> Cropped:
    """Resizes a picture, or the frames of a video, until it covers its bucket, and cuts the bucket's size from it.

    Args:
        alpha_mask: whether the alpha of a transparent picture is its mask; with a mask in a file, their product.
        variation: integers on which alone the place of the cut depends; None takes the middle.

    Raises UserError for a picture that cannot be used or has changed since it was found, and for a mask that is
    transparent itself, or leaves nothing to train on.
    """
    masks, moving = [], len(picture.size) == 3
    if moving:
        layers = videos.frames_of(picture.path, picture.size[0], fps)
    else:
        image, alpha = decoded_with_alpha(_file(picture.path), str(picture.path), ground)
        layers, masks = [image], [alpha] if alpha_mask and alpha is not None else []
    if picture.mask_path is not None:
        drawn, seen = decoded_with_alpha(picture.mask_path, str(picture.mask_path))
        if seen is not None:
            raise UserError(f"dataset: the mask {picture.mask_path} is transparent: save it in grey, white to train on")
        masks.append(drawn.convert("L"))
    resized, (top, left) = _placed(picture, variation)

    def part(layer) -> np.ndarray:
        if layer.size != picture.original_size[::-1]:
            raise UserError(f"dataset: {picture.path} has changed since the run began: start again")
        levels = np.asarray(cut(layer, resized, left, top, picture.size[:-3:-1]))
        return levels[:, ::-1] if flip else levels

    mask = None
    if masks:
        mask = torch.from_numpy(np.prod([np.float32(part(each)) / 255 for each in masks], axis=0))[None]
        if not mask.any():
            raise UserError(f"dataset: the mask of {picture.path} leaves nothing to train on: mend it, or remove both")
    # One after the other: frames of full size are large.
    pixels = as_images([np.ascontiguousarray(part(layer).transpose(2, 0, 1)) for layer in layers])
    return Cropped(pixels.transpose(0, 1) if moving else pixels[0], mask, crop_of(picture, flip, variation))


def crop_of(picture: CaptionedPicture, flip: bool, variation: tuple[int, ...] | None) -> tuple[int, int]:
    """Returns top and left of the part that `cropped` cuts from the resized picture, which is mirrored before."""
    resized, (top, left) = _placed(picture, variation)
    return top, resized[0] - picture.size[-1] - left if flip else left


def _placed(picture: CaptionedPicture, variation: tuple[int, ...] | None) -> tuple[tuple[int, int], tuple[int, int]]:
    """Returns width and height of the resized picture, and top and left of the cut."""
    (height, width), (tall, wide) = picture.original_size, picture.size[-2:]
    # Rounding might miss a pixel of the side that is cut.
    if width * tall >= height * wide:
        resized = max(round(width * tall / height), wide), tall
    else:
        resized = wide, max(round(height * wide / width), tall)
    right, below = resized[0] - wide, resized[1] - tall
    if variation is None:
        return resized, (below // 2, right // 2)
    first, second = (int(word) for word in random_words(2, CROPS, *variation))
    return resized, (second % (below + 1), first % (right + 1))


def content_key(picture: CaptionedPicture, **options: object) -> str:
    """Returns the SHA-256 of all that a picture's encoding depends on: files' contents, caption, bucket and `options`.

    Raises UserError for an unreadable file.
    """
    files = [None if path is None else _digest(path) for path in (picture.path, picture.mask_path)]
    parts = [files, picture.caption, picture.size, options]
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _file(path: Path | ColumnPicture) -> Path | bytes:
    return path if isinstance(path, Path) else path.read()


def _digest(path: Path | ColumnPicture) -> str:
    found = _file(path)
    if isinstance(found, bytes):
        return hashlib.sha256(found).hexdigest()
    refused = as_user_error("dataset: cannot use the picture ", DamagedError, after="; repair or remove it")
    with refused, opened(found) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folders_of(folder: str | Sequence[str] | Mapping[str, int]) -> dict[Path, int]:
    """Returns the repeats of each folder of dataset.folder, in the order given; 1 for DIR and [DIR, DIR].

    Raises UserError for another value, and a folder that is missing, inside another one or given twice. DIR without
    repeats must have no name such as 10_cat, from which kohya's scripts read repeats: here they would have no effect.
    """
    if isinstance(folder, Mapping):
        given = [(str(name), repeats) for name, repeats in folder.items()]
    else:
        names = [folder] if isinstance(folder, str) else folder
        if not isinstance(names, Sequence) or not all(isinstance(name, str) for name in names):
            raise UserError(f"dataset.folder={folder}: must be DIR, [DIR, DIR] or {{DIR: repeats}}")
        given = [(name, None) for name in names]
    if not given:
        raise UserError("dataset.folder is empty: give dataset.folder=DIR, [DIR, DIR] or {DIR: repeats}")
    found: dict[Path, int] = {}
    for name, repeats in given:
        path = existing_folder(name)
        if repeats is None:
            _refuse_counted(name, path)
        elif type(repeats) is not int or repeats < 1:
            raise UserError(f"dataset.folder={{{name}: {repeats}}}: repeats must be a whole number of at least 1")
        for other in found:
            first, second = path.resolve(), other.resolve()
            if first.is_relative_to(second) or second.is_relative_to(first):
                raise UserError(
                    f"dataset.folder: {name} and {other} have the same pictures: give one of them, or {{DIR: repeats}}"
                )
        found[path] = repeats or 1
    return found


def _refuse_counted(name: str, path: Path) -> None:
    counted = [
        each for each in (path.absolute(), *sorted(path.iterdir())) if COUNTED.match(each.name) and each.is_dir()
    ]
    if counted:
        first, repeats = counted[0], int(counted[0].name.partition("_")[0])
        shown = name if first == path.absolute() else first
        raise UserError(
            f"dataset.folder={name}: {first.name} is a name with repeats, which are not read: give"
            f" dataset.folder={{{shown}: {repeats}}} with each such folder, or {{{name}: 1}} to show each picture once"
        )


def bucket_sizes(size: int, multiple: int) -> list[tuple[int, int]]:
    """Returns (height, width) of all buckets, in pixels: none has more pixels than a square of edge `size`.

    The sizes are those of NovelAI ("NovelAI Improvements on Stable Diffusion", 2022), which kohya's scripts have too:
    at 512 exactly, and at 1024 the largest ones of SDXL's (Podell et al. 2023, appendix I). Sides are multiples of
    `multiple`. The sides of a bucket that is no square are also multiples of size / STEPS, rounded up to a `multiple`.
    No side is longer than about four times the other. Raises UserError if `size` is below `multiple` or above LARGEST.
    """
    if not multiple <= size <= LARGEST:
        raise UserError(
            f"dataset.size={size}: must be at least {multiple}, of which the model needs a multiple, and at most"
            f" {LARGEST} pixels"
        )
    step = -(-size // (STEPS * multiple)) * multiple
    square = size // multiple * multiple
    found = {(square, square)}
    for side in range(-(-size // (2 * step)) * step, 2 * size + 1, step):
        if other := size * size // side // step * step:
            found |= {(side, other), (other, side)}
    return sorted(found)


def nearest_bucket(height: int, width: int, sizes: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Returns the one of `sizes`, each (height, width), with the nearest aspect ratio on a logarithmic scale.

    Of several with the same ratio it returns the largest.
    """

    def whole_to_kept(size: tuple[int, int]) -> float:
        one, other = height * size[1], width * size[0]
        return max(one, other) / min(one, other)

    return min(sizes, key=lambda size: (whole_to_kept(size), -size[0] * size[1], size))
