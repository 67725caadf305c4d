"""Random numbers in the shape of images, latents and their conditions: for measuring speed."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from training.data.examples import RandomBatches
from training.data.packing import random_words
from training.errors import UserError

IMAGES, LABELS = "images", "labels"


class SyntheticImages(RandomBatches):
    """Normally distributed random numbers, new ones in every batch, to measure speed. The loss means nothing.

    A batch has `images`, float32 [B, *shape], with classes `labels`, int64 [B], and a tensor float32 [B, ...] for each
    of `condition`. conf/dataset/synthetic_images.yaml explains the keys.

    Raises UserError if a side of a shape is below 1, or a condition is called `images` or `labels`.
    """

    def __init__(
        self,
        shape: Sequence[int] = (3, 64, 64),
        num_classes: int | None = None,
        condition: Mapping[str, Sequence[int]] | None = None,
        *,
        seed: int,
        batch_size: int,
    ):
        self._shapes = _shapes(shape, condition)
        if num_classes is not None and num_classes < 1:
            raise UserError(f"dataset.num_classes={num_classes}: must be at least 1, or null for no labels")
        self.num_classes, self._seed, self._batch_size = num_classes, seed, batch_size

    @staticmethod
    def meta_batch(
        rows: int,
        *,
        shape: Sequence[int] = (3, 64, 64),
        num_classes: int | None = None,
        condition: Mapping[str, Sequence[int]] | None = None,
        **_others: object,
    ) -> dict[str, Tensor]:
        """Returns a batch of `rows` examples on the meta device, for these keys of the dataset's option."""
        shapes = _shapes(shape, condition)
        batch = {name: torch.empty((rows, *shape), device="meta") for name, shape in shapes.items()}
        if num_classes is not None:
            batch[LABELS] = torch.empty(rows, dtype=torch.int64, device="meta")
        return batch

    def _drawn(self, *key: int) -> dict[str, Tensor]:
        seed = int(random_words(1, self._seed, *key)[0]) & 0x7FFF_FFFF_FFFF_FFFF
        generator = torch.Generator().manual_seed(seed)
        batch = {
            name: torch.randn((self._batch_size, *shape), generator=generator) for name, shape in self._shapes.items()
        }
        if self.num_classes is not None:
            batch[LABELS] = torch.randint(self.num_classes, (self._batch_size,), generator=generator)
        return batch


def _shapes(shape: Sequence[int], condition: Mapping[str, Sequence[int]] | None) -> dict[str, tuple[int, ...]]:
    """Returns the shape of one example of each tensor of floating point. Raises UserError."""
    if not isinstance(condition or {}, Mapping):
        raise UserError(f"dataset.condition={condition}: must be shapes by name, {{text_embeds: [1280]}}, or null")
    shapes = {"shape": shape} | {f"condition.{name}": value for name, value in (condition or {}).items()}
    for name in (IMAGES, LABELS):
        if name in (condition or {}):
            raise UserError(f"dataset.condition.{name}: the batch has {name} already: choose another name")
    for key, value in shapes.items():
        sides = value if isinstance(value, Sequence) else [None]
        if not all(isinstance(side, int) and side >= 1 for side in sides) or (key == "shape" and not value):
            raise UserError(f"dataset.{key}={value}: must be whole numbers of at least 1, in a list")
    return {IMAGES: tuple(shape)} | {name: tuple(value) for name, value in (condition or {}).items()}
