"""Pictures in a column of a dataset of the Hugging Face Hub, or of local parquet files."""

import hashlib
from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from training.data.hub_rows import HubStream
from training.data.local_files import import_datasets
from training.data.pictures import Square, as_images, check_ground, decoded, meta_images
from training.errors import UserError


class ImageColumn(HubStream):
    """Streams pictures and labels, as `HubStream` does.

    Batches are as in `training.data.images.ImageFolder`: `images`, float32 [B, 3, size, size] from -1 to 1, and
    `labels`, int64 [B]. A picture's short side becomes `size`. conf/dataset/hub_images.yaml explains the keys. At the
    end of an epoch of parquet files `datasets` waits for five seconds.
    """

    otherwise = "or train on a local folder with dataset=images dataset.folder=PATH"

    def __init__(
        self,
        name: str,
        *,
        image_column: str = "image",
        label_column: str | None = "label",
        num_classes: int | None = None,
        size: int = 64,
        crop: str = "random",
        flip: bool = True,
        ground: str = "white",
        **stream: Any,
    ):
        self._image_column, self._label_column = image_column, label_column
        self._square, self._ground = Square(size, crop, flip), ground
        check_ground(ground)
        columns = {"image_column": image_column, "label_column": label_column}
        super().__init__(name, {key: column for key, column in columns.items() if column is not None}, **stream)
        self.num_classes = None if label_column is None else self._classes(num_classes)
        self.class_names = getattr((self._stored.features or {}).get(label_column), "names", None) or []

    @staticmethod
    def meta_batch(
        rows: int, *, size: int = 64, label_column: str | None = "label", **_others: object
    ) -> dict[str, Tensor]:
        """Returns a batch of `rows` examples on the meta device, for these keys of the dataset's option."""
        return meta_images(rows, 3, size, size, labels=label_column is not None)

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU. Raises UserError if a row cannot be used, or there are no rows."""
        return self._batch_of(self._part_of(index))

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns up to `count` batches of held-out pictures, in stored order, cut in the middle. Raises as `batch`."""
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

    def _of_epoch(self, number: int) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
        """Yields examples with the integers of their variation."""
        return ((each, (self._seed, place, number)) for place, each in enumerate(self._epoch(number)))

    def _parts_of_batches(self, stream: Iterator[Any]) -> Iterator[list[Any]]:
        while True:
            yield list(islice(stream, self._batch_size))

    @property
    def _nothing(self) -> str:
        return "no pictures to train on; choose another dataset"

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
        squares = []
        for row, variation in examples:
            # A picture in a column has no name; by its hash the user can find it.
            name = f"of {self._name} with SHA-256 {hashlib.sha256(row['image']).hexdigest()}"
            squares.append(self._square.of(decoded(row["image"], name, self._ground), variation))
        batch = {"images": as_images(squares)}
        if self._label_column is not None:
            batch["labels"] = torch.tensor([row["label"] for row, _ in examples])
        return batch
