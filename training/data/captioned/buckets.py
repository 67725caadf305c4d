"""Which pictures are in the batch of a step: all of one bucket, so that they have one size."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from training.data.captioned.pictures import CaptionedPicture
from training.data.packing import random_words

# In the keys of random numbers.
WITHIN, ACROSS = 0x6275636B, 0x73746570


class BucketBatches:
    """Batches of pictures of one size. Each epoch has the pictures, and the batches, in a new order.

    An epoch shows each picture `repeats` times. Where the last batch of a bucket is not full, pictures of the bucket
    that the epoch showed first fill it up, and are shown once more.

    Args:
        pictures: at least one.
        batch_size: pictures in a batch, of all ranks together.
        seed: decides the order.
    """

    def __init__(self, pictures: Sequence[CaptionedPicture], batch_size: int, seed: int):
        self._batch_size, self._seed = batch_size, seed
        self._buckets: dict[tuple[int, int], list[int]] = {}
        # Sorted: the order of a bucket does not depend on which bucket's picture comes first.
        for size in sorted({picture.size for picture in pictures}):
            self._buckets[size] = [
                number
                for number, picture in enumerate(pictures)
                if picture.size == size
                for _ in range(picture.repeats)
            ]
        # A step and the one before it may be of two epochs.
        self._batches_of = lru_cache(maxsize=2)(self._of_epoch)

    @property
    def steps_per_epoch(self) -> int:
        return sum(-(-len(numbers) // self._batch_size) for numbers in self._buckets.values())

    def of_step(self, step: int) -> list[int]:
        """Returns the places in `pictures` of the batch of step >= 0; one may occur twice.

        It depends on pictures, batch size, seed and step alone.
        """
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
