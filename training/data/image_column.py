"""Pictures in a column of a dataset of the Hugging Face Hub, or of local parquet files."""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.data.corpus import check_column, import_datasets
from training.data.examples import check_share
from training.data.hub_rows import columns_of, open_rows
from training.data.pictures import as_images, check_square, decoded, meta_images, square_of
from training.errors import UserError, first_line

USE_FOLDER = "or train on a local folder with dataset=images dataset.folder=PATH"


class ImageColumn:
    """Streams pictures and labels of a dataset of the Hub, or of a local folder of parquet files, without storing them.

    Rows are shuffled and read as in `training.data.hub.HubText`: batches of increasing index one after another, a jump
    back from the first row again. At the end of an epoch of parquet files `datasets` waits for five seconds.

    Batches are as in `training.data.images.ImageFolder`: `images`, float32 [B, 3, size, size] from -1 to 1, and
    `labels`, int64 [B]. A picture's short side becomes `size`.

    A split of its own (`eval_split`) is held out, or the pictures whose hash is in the first `eval_share` of all.

    Args:
        name: `owner/name` on the Hub, or a local folder with parquet files.
        config_name, split, revision, shuffle_buffer, eval_split, eval_share, cache_dir: as for `HubText`.
        image_column: the column of pictures: of the type Image, or with the bytes of picture files.
        label_column: the column of labels, whole numbers; null for none.
        num_classes: labels are below this; null where the dataset's own type of the column tells.
        size: height and width of an image in pixels.
        crop: "random" takes a new square of a picture in each epoch, "centre" the middle. Those held out are "centre".
        flip: whether half of the pictures are mirrored, others in each epoch.
        seq_len: unused; every dataset accepts it.

    Raises:
        UserError: within seconds, if there is no network or no such dataset, configuration, split or column. Also
            later, if a picture or label cannot be used, or the network fails for long.
    """

    num_blocks = None

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
        if not name:
            raise UserError("dataset.name is empty: give dataset.name=OWNER/NAME, a dataset on huggingface.co")
        check_square(size, crop)
        check_share(eval_share)
        if cache_dir is None:
            cache_dir = tempfile.mkdtemp(prefix="datasets-")
            weakref.finalize(self, shutil.rmtree, cache_dir, ignore_errors=True)
        self._name = name
        self._image_column, self._label_column = image_column, label_column
        self._seed, self._batch_size = seed, batch_size
        self._size, self._crop, self._flip = size, crop, flip
        self._eval_split = eval_split
        self._eval_share = eval_share if eval_split is None else 0.0
        self._open_split = partial(self._open, config_name, revision=revision, folder=str(cache_dir))
        self._stored_rows = self._open_split(split)
        self.num_classes = None if label_column is None else self._classes(num_classes)
        self._rows = self._stored_rows.shuffle(seed=seed & 0xFFFF_FFFF_FFFF_FFFF, buffer_size=shuffle_buffer)
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
        if self._eval_split is not None:
            rows = self._usable(self._open_split(self._eval_split, key="eval_split"))
        else:
            rows = self._usable(self._stored_rows, held_out=True) if self._eval_share else iter(())
        examples = [(row, None) for row in islice(rows, count * self._batch_size)]
        return [
            self._batch_of(examples[start : start + self._batch_size])
            for start in range(0, len(examples), self._batch_size)
        ]

    def _open(self, config_name: str | None, split: str, revision: str | None, folder: str, key: str = "split") -> Any:
        rows = open_rows(
            self._name, config_name, split, revision=revision, folder=folder, split_key=key, otherwise=USE_FOLDER
        )
        columns = {"image_column": self._image_column, "label_column": self._label_column}
        columns = {key: column for key, column in columns.items() if column is not None}
        for column_key, column in columns.items():
            check_column(column, columns_of(rows), self._name, column_key)
        rows = rows.select_columns(list(dict.fromkeys(columns.values())))
        datasets = import_datasets()
        if rows.features and isinstance(rows.features[self._image_column], datasets.Image):
            # The library would decode without a limit.
            rows = rows.cast_column(self._image_column, datasets.Image(decode=False))
        return rows

    def _classes(self, given: int | None) -> int:
        features = self._stored_rows.features or {}
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
            self._rows.set_epoch(epoch)
            number = -1
            for number, row in enumerate(self._usable(self._rows)):
                yield row, (self._seed, number, epoch)
            if number < 0:
                raise UserError(f"dataset.name={self._name}: no pictures to train on; choose another dataset")
            epoch += 1

    def _usable(self, rows: Any, held_out: bool = False) -> Iterator[dict[str, Any]]:
        """Yields {image: bytes, label} of each row that is held out or is not."""
        try:
            for row in rows:
                content = self._content(row[self._image_column])
                if self._is_held_out(content) == held_out:
                    yield {"image": content, "label": self._label(row)}
        except UserError:
            raise
        except Exception as error:  # network and Arrow libraries raise errors without a common base class
            raise UserError(
                f"dataset.name={self._name}: reading failed ({first_line(error)}); check the network and start again, "
                f"{USE_FOLDER}"
            ) from error

    def _content(self, value: Any) -> bytes:
        if isinstance(value, dict):
            value = value.get("bytes")
        if not isinstance(value, bytes):
            raise UserError(
                f"dataset.image_column={self._image_column}: contains {type(value).__name__}, not the bytes of"
                f" pictures, in {self._name}; name another column, {USE_FOLDER}"
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

    def _is_held_out(self, content: bytes) -> bool:
        if not self._eval_share:
            return False
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return int.from_bytes(digest) < self._eval_share * 2**64

    def _batch_of(self, examples: list[tuple[dict[str, Any], tuple[int, ...] | None]]) -> dict[str, Tensor]:
        batch = {"images": as_images([self._square(row["image"], variation) for row, variation in examples])}
        if self._label_column is not None:
            batch["labels"] = torch.tensor([row["label"] for row, _ in examples])
        return batch

    def _square(self, content: bytes, variation: tuple[int, ...] | None) -> np.ndarray:
        # A picture in a column has no name; its hash finds it.
        name = f"of {self._name} with SHA-256 {hashlib.sha256(content).hexdigest()}"
        return square_of(decoded(content, name), self._size, variation, crop=self._crop == "random", flip=self._flip)
