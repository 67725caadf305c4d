"""Captioned: pictures with captions, as the VAE and the text encoders of a pipeline have encoded them."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from models.pipelines.calls import ASKED, NetworkCall
from models.pipelines.encoded import INDEX, EncodedFolder
from models.pipelines.recording import Asked
from models.pipelines.videos import CROP, called_with, check_makes_videos, rate_of
from training.data.captioned.columns import pictures_in_columns
from training.data.captioned.pictures import (
    CaptionedPicture,
    Cropped,
    bucket_sizes,
    content_key,
    crop_of,
    cropped,
    find_pictures,
    folders_of,
    in_buckets,
)
from training.data.examples import check_share
from training.data.packing import epoch_order, random_words
from training.data.pictures import LOSS_MASK, check_ground
from training.data.pipeline_folder import pipeline_folder
from training.errors import UserError, as_user_error

LATENTS, MASK, IMAGES = "latents", "mask", "images"
# Buckets end at about 4:1.
LONG = 5
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
# Parts of the keys of random numbers: which pictures are held out, what is drawn for a batch, the order within a bucket
# and the order of an epoch's batches.
HELD_OUT, DRAWN = 0x68656C64, 0x647261776E
WITHIN, ACROSS = 0x6275636B, 0x73746570


class View(NamedTuple):
    """A part of a picture: mirrored or not, and the number of a random place; None is the middle."""

    flip: bool
    crop: int | None


@dataclass(frozen=True)
class Missing:
    """Examples that are not encoded yet: captions with the sizes of their pictures, and views of pictures, by key."""

    captions: Mapping[str, Asked]
    pictures: Mapping[str, tuple[CaptionedPicture, View]]

    def __bool__(self) -> bool:
        return bool(self.captions or self.pictures)

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """The sizes of both, (height, width)."""
        found = {asked.size for asked in self.captions.values()}
        return sorted(found.union(picture.size for picture, _ in self.pictures.values()))


class Captioned:
    """Pictures with captions, for a model with its pipeline (model=pipeline): in folders, or in columns of a dataset.

    The pictures of a batch have the size of one bucket: about `size` x `size` pixels, with about the pictures' aspect
    ratio. A batch has `images`, the normalised latents, float32 [B, ...], drawn anew from the VAE's distribution for
    each batch; under names that begin with `asked.` the conditions with which the pipeline calls its network; and with
    `masked` the weights of the loss, `loss_mask`, float32 [B, height, width] of the latents, from 0 to 1.
    conf/dataset/captioned.yaml explains the keys.

    Raises UserError if there are no pictures, or one cannot be used.
    """

    data_changed = "a picture, a mask or a caption has changed, or is new or gone"

    def __init__(
        self,
        folder: str | Sequence[str] | Mapping[str, int] | None = None,
        name: str | None = None,
        config_name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        image_column: str = "image",
        text_column: str = "text",
        size: int = 1024,
        multiple: int = 64,
        frames: int | None = None,
        fps: float | None = None,
        flip: bool = False,
        crops: int = 1,
        ground: str = "white",
        masked: bool = False,
        caption_dropout: float = 0.1,
        eval_share: float = 0.0,
        pipeline: str | None = None,
        precision: str = "bf16",
        overrides: Mapping[str, Any] | None = None,
        *,
        seed: int,
        batch_size: int,
    ):
        check_share(eval_share)
        check_ground(ground)
        self.encoded = encoded_by(pipeline, precision, overrides)
        self._ground, self._masked, self._dropout = ground, masked, caption_dropout
        places = [None] if crops == 1 else range(crops)
        self._views = [View(mirrored, crop) for mirrored in (False, True)[: 1 + flip] for crop in places]
        source = self.encoded.pipeline
        self._tells_crops = CROP in called_with(source)
        self._fps = None if frames is None else _rate(frames, fps, source)
        if (folder is None) == (name is None):
            raise UserError("dataset=captioned: give dataset.folder=DIR or dataset.name=OWNER/NAME, one of them")
        for key, value, lacks in (("fps", fps, frames is None), ("frames", frames, name is not None)):
            if value is not None and lacks:
                needs = "dataset.frames" if key == "fps" else "dataset.folder, whose videos alone are read"
                raise UserError(f"dataset.{key}={value}: has no effect without {needs}: give that, or leave it out")
        if name is None:
            given = {"split": split, "image_column": image_column, "text_column": text_column}
            for key, value in (given | {"config_name": config_name, "revision": revision}).items():
                if value not in ("train", "image", "text", None):
                    problem = "is of dataset.name: captions of a folder are in NAME.txt, or in text of metadata.jsonl"
                    raise UserError(f"dataset.{key}={value}: {problem}; leave it out")
            found = find_pictures(folders_of(folder), size=size, multiple=multiple, frames=frames, fps=self._fps)
        else:
            rows = pictures_in_columns(name, config_name, split, revision, image_column, text_column)
            found = in_buckets(rows, size=size, multiple=multiple)
        # Of all folders, in an order of their own.
        found = [found[number] for number in epoch_order(len(found), HELD_OUT, 0)]
        self._keys: dict[CaptionedPicture, str] = {}
        # The same picture may be in two folders, or in a row for each of its captions.
        held = {self._key(picture, self._views[0]) for picture in found[len(found) - int(len(found) * eval_share) :]}
        self._pictures, self._held_out = [], []
        for picture in found:
            is_held = bool(held) and self._key(picture, self._views[0]) in held
            (self._held_out if is_held else self._pictures).append(picture)
        if not self._pictures:
            raise UserError(f"dataset.eval_share={eval_share}: holds out all pictures, which are the same: add others")
        self._batches = BucketBatches(self._pictures, batch_size, seed)
        self._seed, self._batch_size = seed, batch_size
        self._calls: dict[tuple[int, ...], NetworkCall] = {}

    @property
    def num_blocks(self) -> int:
        """Examples of an epoch, those that fill up batches included."""
        return self._batches.steps_per_epoch * self._batch_size

    @property
    def holds_out(self) -> bool:
        return bool(self._held_out)

    @staticmethod
    def meta_batch(
        rows: int,
        *,
        size: int = 1024,
        multiple: int = 64,
        frames: int | None = None,
        pipeline: str | None = None,
        precision: str = "bf16",
        overrides: Mapping[str, Any] | None = None,
        masked: bool = False,
        **_others: object,
    ) -> dict[str, Tensor]:
        """Returns a batch of the largest encoded pictures, on the meta device. Raises UserError if none is encoded."""
        sizes = bucket_sizes(size, multiple)
        sizes += [(frames, *each) for each in sizes]
        calls = [call for call in encoded_by(pipeline, precision, overrides).calls() if call.size in sizes]
        if not calls:
            raise UserError(
                "dataset=captioned: its pictures are not encoded yet, and this pipeline needs values: begin a run first"
                " (steps=1 plan=false)"
            )
        noise = calls[0].noise
        batch = {IMAGES: torch.empty(rows, *noise, device="meta")}
        if masked:
            batch[LOSS_MASK] = torch.empty(rows, *noise[-2:], device="meta")
        return batch | {f"{ASKED}{name}": tensor for name, tensor in calls[0].meta_conditions(rows).items()}

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of all pictures and captions, and of how they are cut."""
        keys = [f"{self._key(picture, self._views[0])} {picture.repeats} {picture.caption}" for picture in self._all]
        return hashlib.sha256("\n".join([f"{self._views} {self._masked} {self._dropout}", *keys]).encode()).hexdigest()

    def facts(self) -> dict[str, str]:
        """Returns what is to be said of the pictures."""
        sizes = {picture.size for picture in self._all}
        shown = sum(picture.repeats for picture in self._pictures)
        filled = self.num_blocks - shown
        twice = f", {filled} of them once more to fill batches of one size" if filled else ""
        videos = sum(len(picture.size) == 3 for picture in self._all)
        moving = f", {videos} of them videos" if videos else ""
        long = [each.path for each in self._all if max(each.original_size) > LONG * min(each.original_size)]
        cut = f"; {len(long)} longer than {LONG}:1 lose more than a fifth by the cut: {long[0]}" if long else ""
        return {"pictures": f"{len(self._all)} in {len(sizes)} sizes{moving}; an epoch shows {shown}{twice}{cut}"}

    def missing(self) -> Missing:
        """Returns what is not encoded yet."""
        seen = [(picture, view) for picture in self._all for view in self._views]
        captions = {_caption_key(asked): asked for each in seen for asked in (self._asked(*each), _empty(each[0]))}
        pictures = {self._key(*each): each for each in seen}
        called = {call.size for call in self.encoded.calls()}
        return Missing(
            {key: asked for key, asked in captions.items() if asked.size not in called or not self.encoded.has(key)},
            {key: each for key, each in pictures.items() if not self.encoded.has(key)},
        )

    def cropped(self, picture: CaptionedPicture, view: View) -> Cropped:
        """Returns the pixels of a picture, as they are encoded."""
        options = {"ground": self._ground, "alpha_mask": self._masked, "fps": self._fps}
        read = picture if self._masked else replace(picture, mask_path=None)
        return cropped(read, flip=view.flip, variation=self._variation(picture, view), **options)

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU, a pure function of seed and index."""
        numbers = self._batches.of_step(index)
        words = random_words(3 * len(numbers), self._seed, DRAWN, index).reshape(len(numbers), 3)
        return self._joined(
            [
                (
                    self._pictures[number],
                    self._views[view % len(self._views)],
                    dropped / 2**64 < self._dropout,
                    int(drawn) & 0x7FFF_FFFF_FFFF_FFFF,
                )
                for number, (view, dropped, drawn) in zip(numbers, words.tolist(), strict=True)
            ]
        )

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns at most `count` batches of held-out pictures on the CPU, the same at each call."""
        by_size: dict[tuple[int, int], list[CaptionedPicture]] = {}
        for picture in self._held_out:
            by_size.setdefault(picture.size, []).append(picture)
        batches = [
            pictures[start : start + self._batch_size]
            for pictures in by_size.values()
            for start in range(0, len(pictures), self._batch_size)
        ]
        return [
            self._joined([(picture, self._views[0], False, number) for number, picture in enumerate(batch)])
            for batch in batches[:count]
        ]

    @property
    def _all(self) -> list[CaptionedPicture]:
        return [*self._pictures, *self._held_out]

    def _joined(self, examples: Sequence[tuple[CaptionedPicture, View, bool, int]]) -> dict[str, Tensor]:
        """Returns the batch of pictures, each with its view, whether it is without its caption, and a seed."""
        images, masks, conditions = [], [], []
        for picture, view, without_caption, seed in examples:
            found = self.encoded.read(self._key(picture, view))
            mean, std = found[LATENTS]
            images.append(mean + std * torch.randn(mean.shape, generator=torch.Generator().manual_seed(seed)))
            masks.append(found.get(MASK, torch.ones(mean.shape[-2:])))
            noise = tuple(mean.shape)
            call = self._calls[noise] = self._calls.get(noise) or self.encoded.call_of(noise)
            own = self.encoded.read(_caption_key(self._asked(picture, view)))
            if without_caption:
                own = call.without_caption(own, self.encoded.read(_caption_key(_empty(picture))))
            conditions.append(own)
        batch = {IMAGES: torch.stack(images)}
        if self._masked:
            batch[LOSS_MASK] = torch.stack(masks)
        with as_user_error("dataset=captioned: "):
            merged = call.merged(conditions)
        return batch | {f"{ASKED}{name}": tensor for name, tensor in merged.items()}

    def _asked(self, picture: CaptionedPicture, view: View) -> Asked:
        # Else the same caption would be kept for each place.
        crop = crop_of(picture, view.flip, self._variation(picture, view)) if self._tells_crops else (0, 0)
        return Asked((picture.caption,), picture.size, picture.original_size, crop)

    def _variation(self, picture: CaptionedPicture, view: View) -> tuple[int, int] | None:
        # Of the picture too: else all pictures of one size would be cut at the same places.
        return None if view.crop is None else (view.crop, int(self._key(picture, View(False, None))[:15], 16))

    def _key(self, picture: CaptionedPicture, view: View) -> str:
        # Once in a run: it reads the whole file, and each batch asks for it.
        if picture not in self._keys:
            # Latents do not depend on the caption.
            alone = replace(picture, caption="")
            rate = {"fps": self._fps} if len(picture.size) == 3 else {}
            self._keys[picture] = content_key(alone, ground=self._ground, masked=self._masked, **rate)
        place = "" if view.crop is None else f"-part{view.crop}"
        return f"{self._keys[picture]}{place}{'-mirrored' if view.flip else ''}"


def encoded_by(pipeline: str | None, precision: str, overrides: Mapping[str, Any] | None = None) -> EncodedFolder:
    """Returns the results of the encoders of `pipeline`, a value of model.source. Raises UserError without one."""
    folder = None if pipeline is None else pipeline_folder(pipeline)
    if folder is None or not (folder / INDEX).is_file():
        raise UserError("dataset=captioned: take model=pipeline model.source=SOURCE, a whole pipeline")
    return EncodedFolder(folder, DTYPES[str(precision)], overrides)


def _rate(frames: int, fps: float | None, pipeline: Path) -> float | None:
    """Returns the rate at which frames are taken. Raises UserError for a pipeline of pictures, or with another rate."""
    with as_user_error(f"dataset.frames={frames}: ", after=": take a pipeline of videos, or null and pictures alone"):
        check_makes_videos(pipeline)
    told = rate_of(pipeline)
    if fps is not None and told not in (None, fps):
        raise UserError(f"dataset.fps={fps}: the pipeline tells its network {told:g}: take null, which takes that")
    return told if fps is None else fps


def _empty(picture: CaptionedPicture) -> Asked:
    return Asked(("",), picture.size, picture.size)


def _caption_key(asked: Asked) -> str:
    return hashlib.sha256(
        json.dumps([*asked.prompts, asked.size, asked.original_size, asked.crop]).encode()
    ).hexdigest()


class BucketBatches:
    """Batches of pictures of one size. An epoch shows each picture `repeats` times, in a new order.

    The last batch of a bucket is filled up with the first pictures of the bucket in this epoch. `batch_size` counts the
    pictures of all ranks together; `seed` decides the order.
    """

    def __init__(self, pictures: Sequence[CaptionedPicture], batch_size: int, seed: int):
        self._batch_size, self._seed = batch_size, seed
        self._buckets: dict[tuple[int, int], list[int]] = {}
        # Sorted, so that the order of the buckets does not depend on the order of the pictures.
        for size in sorted({picture.size for picture in pictures}):
            self._buckets[size] = [
                number
                for number, picture in enumerate(pictures)
                if picture.size == size
                for _ in range(picture.repeats)
            ]
        # Two: a step and the step before it may be in different epochs.
        self._batches_of = lru_cache(maxsize=2)(self._of_epoch)

    @property
    def steps_per_epoch(self) -> int:
        return sum(-(-len(numbers) // self._batch_size) for numbers in self._buckets.values())

    def of_step(self, step: int) -> list[int]:
        """Returns the batch of `step` >= 0 as indices of `pictures`, of which one may be there twice."""
        epoch, place = divmod(step, self.steps_per_epoch)
        return self._batches_of(epoch)[place]

    def _of_epoch(self, epoch: int) -> list[list[int]]:
        batches = []
        for size, numbers in self._buckets.items():
            order = _permuted(len(numbers), WITHIN, self._seed, epoch, *size)
            for start in range(0, len(order), self._batch_size):
                places = range(start, start + self._batch_size)
                batches.append([numbers[order[place % len(order)]] for place in places])
        return [batches[place] for place in _permuted(len(batches), ACROSS, self._seed, epoch)]


def _permuted(count: int, *key: int) -> np.ndarray:
    return np.argsort(random_words(count, *key), kind="stable")
