"""Rows of a dataset of the Hugging Face Hub, or of a local folder of the same layout, which are read when needed."""

import hashlib
import os
import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from itertools import count
from pathlib import Path
from typing import Any, ClassVar

from training.data.examples import check_share
from training.data.hub_client import ask_for_dataset, refuse_keys_of_hub
from training.data.local_files import check_column, import_datasets
from training.errors import UserError, as_user_error

# A folder with this file is a dataset of `save_to_disk`, which `load_dataset` refuses.
SAVED = "state.json"


class HubStream(ABC):
    """Streams a dataset of the Hugging Face Hub, or of a local folder with the same layout, without storing it.

    Each epoch shuffles the shards, and the rows through a buffer. Batches of increasing index are read one after
    another. A jump forward reads and drops what is in between; a jump back starts again from the first row. So
    resuming a long run reads its data once more. The batches are the same either way.

    Held out is a split of its own (`eval_split`), or the examples whose hash is in the first `eval_share` of all
    possible hashes. So no epoch has a held-out example, or another row with the same content, in whatever order it
    reads.

    `columns` are those that are read, {key: column that it names}. conf/dataset/hub.yaml explains the other keys.

    Raises UserError within seconds if there is no network or no such dataset, configuration, split or column; and while
    it reads, if an example cannot be used, or the network fails for longer than the retries of `datasets` last.
    """

    num_blocks = None
    reads_hub = True
    otherwise: ClassVar[str]
    """what to do without the Hub, for messages"""

    def __init__(
        self,
        name: str,
        columns: Mapping[str, str],
        *,
        seed: int,
        batch_size: int,
        config_name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        shuffle_buffer: int = 1000,
        eval_split: str | None = None,
        eval_share: float = 0.0,
        cache_dir: str | Path | None = None,
    ):
        if not name:
            raise UserError("dataset.name is empty: give dataset.name=OWNER/NAME, a dataset on huggingface.co")
        check_share(eval_share)
        if cache_dir is None:
            cache_dir = tempfile.mkdtemp(prefix="datasets-")
            weakref.finalize(self, shutil.rmtree, cache_dir, ignore_errors=True)
        self._name, self._columns = name, columns
        self._seed, self._batch_size = seed, batch_size
        self._given = {"revision": revision, "folder": str(cache_dir), "otherwise": self.otherwise}
        self._config_name = config_name
        self._eval_split, self._eval_share = eval_split, eval_share if eval_split is None else 0.0
        self._stored = self._opened(split)
        self._rows = self._stored.shuffle(seed=seed & 0xFFFF_FFFF_FFFF_FFFF, buffer_size=shuffle_buffer)
        self._next_index, self._parts = 0, self._parts_of_batches(self._all_epochs())

    def _part_of(self, index: int) -> Any:
        """Returns what batch `index` is made of. Raises UserError if that cannot be read, or there is nothing."""
        if index < self._next_index:
            self._next_index, self._parts = 0, self._parts_of_batches(self._all_epochs())
        for _ in range(index - self._next_index):
            next(self._parts)
        self._next_index = index + 1
        return next(self._parts)

    def _all_epochs(self) -> Iterator[Any]:
        for epoch in count():
            is_empty = True
            for each in self._of_epoch(epoch):
                is_empty = False
                yield each
            if is_empty:
                raise UserError(f"dataset.name={self._name}: {self._nothing}")

    @property
    @abstractmethod
    def _nothing(self) -> str:
        """What is wrong where an epoch is empty, and what to do, for a message."""

    @abstractmethod
    def _of_epoch(self, number: int) -> Iterator[Any]:
        """Yields what `_epoch` does, in the form from which batches are made."""

    @abstractmethod
    def _parts_of_batches(self, stream: Iterator[Any]) -> Iterator[Any]:
        """Divides what `_of_epoch` yields of one epoch after the other, without end, between batches."""

    @abstractmethod
    def _example(self, row: dict[str, Any]) -> tuple[bytes, Any] | None:
        """Returns what is hashed of a row, and its example; None for one without. Raises UserError for a wrong one."""

    def _opened(self, split: str, key: str = "split") -> Any:
        rows = open_rows(self._name, self._config_name, split, split_key=key, **self._given)
        for column_key, column in self._columns.items():
            check_column(column, columns_of(rows), self._name, column_key)
        return rows.select_columns(list(dict.fromkeys(self._columns.values())))

    def _epoch(self, number: int) -> Iterator[Any]:
        """Yields the examples of an epoch."""
        self._rows.set_epoch(number)
        return self._read(self._rows, held_out=False)

    def _held_out(self) -> Iterator[Any]:
        """Yields those that are held out, as they are stored. Raises UserError for an unknown `eval_split`."""
        if self._eval_split is not None:
            return self._read(self._opened(self._eval_split, "eval_split"), held_out=False)
        return self._read(self._stored, held_out=True) if self._eval_share else iter(())

    def _read(self, rows: Any, held_out: bool) -> Iterator[Any]:
        after = f"); check the network and start again, {self.otherwise}"
        # Network, Arrow and JSON libraries raise errors without a common base class.
        with as_user_error(f"dataset.name={self._name}: reading failed (", Exception, after=after):
            for row in rows:
                found = self._example(row)
                if found is not None and self._is_held_out(found[0]) == held_out:
                    yield found[1]

    def _is_held_out(self, content: bytes) -> bool:
        if not self._eval_share:
            return False
        digest = hashlib.blake2b(content, digest_size=8).digest()
        return int.from_bytes(digest) < self._eval_share * 2**64


def open_rows(
    name: str,
    config_name: str | None,
    split: str,
    *,
    revision: str | None,
    folder: str,
    otherwise: str,
    split_key: str = "split",
) -> Any:
    """Returns an iterable dataset of `datasets`, metadata in `folder`. Raises UserError, naming `split_key`."""
    datasets = import_datasets()
    saved = os.path.isfile(os.path.join(name, SAVED))
    if os.path.isdir(name):
        refuse_keys_of_hub(name, revision=revision, config_name=config_name if saved else None)
    else:
        _keep_client_files_in(folder)
        ask_for_dataset(name, revision, otherwise)
    asked = f"dataset.name={name} dataset.config_name={config_name} dataset.{split_key}={split}: "
    where = {"cache_dir": folder, "download_config": datasets.DownloadConfig(cache_dir=f"{folder}/downloads")}
    # The library raises about ten types of error, without a common base class.
    with as_user_error(asked, Exception):
        if saved:
            if split != "train":
                raise ValueError("it was saved without splits: give train")
            rows = datasets.load_from_disk(name).to_iterable_dataset()
        else:
            rows = datasets.load_dataset(name, config_name, split=split, revision=revision, streaming=True, **where)
        # Where the columns are not known, this reads the first row.
        columns_of(rows)
    return rows


def columns_of(rows: Any) -> list[str]:
    """Returns the names of the columns of `open_rows`; from the first row where the files do not tell."""
    return rows.column_names or list(next(iter(rows), {}))


def _keep_client_files_in(folder: str) -> None:
    """Makes the Hub's client write below `folder`, not in the home directory. It still reads a login from there."""
    from huggingface_hub import constants

    constants.HF_HUB_CACHE = os.path.join(folder, "hub")
    # The Xet transport writes caches and logs of its own, and does not speed up reading rows in order.
    constants.HF_HUB_DISABLE_XET = True
    # With telemetry, the client asks the Hub for a list of known callers first, and stores it in the home directory.
    constants.HF_HUB_DISABLE_TELEMETRY = True
