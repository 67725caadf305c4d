"""Pictures in a column of a dataset of the Hugging Face Hub, or of local parquet files."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.data.corpus import import_datasets
from training.data.hub_rows import HubStream
from training.data.pictures import as_images, check_square, decoded, meta_images, square_of
from training.errors import UserError


class ImageColumn(HubStream):
    """Streams pictures and labels, as `HubStream` does. At the end of an epoch of parquet files `datasets` waits for
    five seconds.

    Batches are as in `training.data.images.ImageFolder`: `images`, float32 [B, 3, size, size] from -1 to 1, and
    `labels`, int64 [B]. A picture's short side becomes `size`.

    Args:
        image_column: the column of pictures: of the type Image, or with the bytes of picture files.
        label_column: the column of labels, whole numbers; null for none.
        num_classes: labels are below this; null where the dataset's own type of the column tells.
        size: height and width of an image in pixels.
        crop: "random" takes a new square of a picture in each epoch, "centre" the middle. Those held out are "centre".
        flip: whether half of the pictures are mirrored, others in each epoch.
        seq_len: unused; every dataset accepts it.
    """

    otherwise = "or train on a local folder with dataset=images dataset.folder=PATH"

    def __init__(
        self,
        name: str,
        config_name: str | None = None,
        split: str = "train",
        image_column: str = "image",
        label_column: str | None = "label",
        num_classes: int | None = None,
        revision: str | None = None,
        size: int = 64,
        crop: str = "random",
        flip: bool = True,
        *,
        seed: int,
        batch_size: int,
        seq_len: int | None = None,
        shuffle_buffer: int = 1000,
        eval_split: str | None = None,
        eval_share: float = 0.0,
        cache_dir: str | Path | None = None,
    ):
        check_square(size, crop)
        self._image_column, self._label_column = image_column, label_column
        self._seed, self._batch_size = seed, batch_size
        self._size, self._crop, self._flip = size, crop, flip
        columns = {"image_column": image_column, "label_column": label_column}
        super().__init__(
            name,
            config_name,
            split,
            revision,
            {key: column for key, column in columns.items() if column is not None},
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            eval_split=eval_split,
            eval_share=eval_share,
            cache_dir=cache_dir,
        )
        self.num_classes = None if label_column is None else self._classes(num_classes)
        self._restart()

    @staticmethod
    def meta_batch(
        rows: int, *, size: int = 64, label_column: str | None = "label", **_others: object
    ) -> dict[str, Tensor]:
        """Returns a batch of `rows` examples on the meta device, for these keys of the dataset's option."""
        return meta_images(rows, size, label_column is not None)

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU. Earlier calls do not change it.

        Raises:
            UserError: a picture or label cannot be used, the rows can no longer be read, or there are none.
        """
        if index < self._next_index:
            self._restart()
        for _ in range((index - self._next_index) * self._batch_size):
            next(self._examples)
        self._next_index = index + 1
        return self._batch_of(list(islice(self._examples, self._batch_size)))

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns up to `count` batches of held-out pictures, as they are stored; the last may be smaller.

        Reads from the beginning until there are enough. Empty where nothing is held out. Raises UserError as `batch`
        does, and for an unknown `eval_split`.
        """
        examples = [(row, None) for row in islice(self._held_out(), count * self._batch_size)]
        return [
            self._batch_of(examples[start : start + self._batch_size])
            for start in range(0, len(examples), self._batch_size)
        ]

    def _opened(self, split: str, key: str = "split") -> Any:
        rows, datasets = super()._opened(split, key), import_datasets()
        if rows.features and isinstance(rows.features[self._image_column], datasets.Image):
            # The library would decode without a limit.
            rows = rows.cast_column(self._image_column, datasets.Image(decode=False))
        return rows

    def _classes(self, given: int | None) -> int:
        features = self._stored.features or {}
        known = getattr(features.get(self._label_column), "num_classes", None)
        if known is None and given is None:
            raise UserError(
                f"dataset.num_classes=null: the dataset does not tell how many labels {self._label_column} has: give"
                " the number, or dataset.label_column=null"
            )
        return known if given is None else given

    def _restart(self) -> None:
        """Starts again from the first row of the first epoch."""
        self._next_index = 0
        self._examples = self._all_epochs()

    def _all_epochs(self) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """Yields rows with the integers of their variation, epoch after epoch without end."""
        epoch = 0
        while True:
            number = -1
            for number, row in enumerate(self._epoch(epoch)):
                yield row, (self._seed, number, epoch)
            if number < 0:
                raise UserError(f"dataset.name={self._name}: no pictures to train on; choose another dataset")
            epoch += 1

    def _example(self, row: dict[str, Any]) -> tuple[bytes, dict[str, Any]]:
        content = self._content(row[self._image_column])
        return content, {"image": content, "label": self._label(row)}

    def _content(self, value: Any) -> bytes:
        if isinstance(value, dict):
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise UserError(
                f"dataset.image_column={self._image_column}: contains {type(value).__name__}, not the bytes of"
                f" pictures, in {self._name}; name another column, {self.otherwise}"
            )
        return value

    def _label(self, row: dict[str, Any]) -> int | None:
        if self._label_column is None:
            return None
        label = row[self._label_column]
        if not isinstance(label, int) or not 0 <= label < self.num_classes:
            raise UserError(
                f"dataset.label_column={self._label_column}: contains {label!r}, not a whole number from 0 to"
                f" {self.num_classes - 1}, in {self._name}; name another column, or give dataset.num_classes"
            )
        return label

    def _batch_of(self, examples: list[tuple[dict[str, Any], tuple[int, ...] | None]]) -> dict[str, Tensor]:
        batch = {"images": as_images([self._square(row["image"], variation) for row, variation in examples])}
        if self._label_column is not None:
            batch["labels"] = torch.tensor([row["label"] for row, _ in examples])
        return batch

    def _square(self, content: bytes, variation: tuple[int, ...] | None) -> np.ndarray:
        # A picture in a column has no name; its hash finds it.
        name = f"of {self._name} with SHA-256 {hashlib.sha256(content).hexdigest()}"
        return square_of(decoded(content, name), self._size, variation, crop=self._crop == "random", flip=self._flip)
