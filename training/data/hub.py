"""A dataset that streams text from the Hugging Face Hub."""

import hashlib
import shutil
import tempfile
import weakref
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.config.auto import AUTO
from training.data.corpus import check_column, is_text
from training.data.hub_rows import columns_of, open_rows
from training.data.packing import blocks_of, concatenate, limit_tokens, token_dtype, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError, first_line

USE_LOCAL_FILES = "or train on local files with dataset=text dataset.files=PATH"


class HubText:
    """Streams a dataset of the Hugging Face Hub, or of a local folder with the same layout, without storing it.

    Each epoch shuffles the shards, and the rows through a buffer. Batches of increasing index are read one after
    another. A jump forward reads and drops the text in between; a jump back starts again from the first row. So
    resuming a long run reads its text once more. The batches are the same either way.

    A split of its own (`eval_split`) is held out, or the documents whose hash is in the first `eval_share` of all
    hashes: no epoch has them, whatever the order in which it reads, nor another row with the same text.

    Args:
        name: `owner/name` on the Hub, or a local folder.
        config_name: the dataset's configuration (subset); None where it has only one.
        split: the name of the split.
        text_column: the column that contains the text.
        revision: a commit, tag or branch; a commit keeps batches the same when the owner adds text.
        shuffle_buffer: the number of rows among which the next is drawn.
        tokenizer: a tokenizer.json, a folder or a model of the Hub with one; None for bytes.
        begin, end: the token before and after each document; auto: as the tokenizer says; None: none.
        max_tokens: tokens in an epoch, counted from its shuffled start; None for all.
        eval_split: the name of the split to evaluate on, such as validation; None takes documents of `split`.
        eval_share: the share of the documents of `split` that is held out where `eval_split` is None, from 0 to 0.5.
        cache_dir: a folder for the metadata that the Hub's client stores.

    Raises:
        UserError: within seconds, if there is no network or no such dataset, configuration, split or column. Also
            later, if the network fails for longer than the retries of `datasets` last.
    """

    num_blocks = None

    def __init__(
        self,
        name: str,
        config_name: str | None = None,
        split: str = "train",
        text_column: str = "text",
        revision: str | None = None,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        shuffle_buffer: int = 1000,
        tokenizer: str | None = None,
        begin: str | None = AUTO,
        end: str | None = AUTO,
        max_tokens: int | None = None,
        eval_split: str | None = None,
        eval_share: float = 0.0,
        cache_dir: str | Path | None = None,
    ):
        if not name:
            raise UserError("dataset.name is empty: give dataset.name=OWNER/NAME, a dataset on huggingface.co")
        self._tokenizer = load_tokenizer(tokenizer, begin, end)
        self.vocab_size = self._tokenizer.vocab_size
        self._name = name
        self._text_column = text_column
        self._max_tokens = max_tokens
        self._seq_len = seq_len
        self._batch_size = batch_size
        if cache_dir is None:
            cache_dir = tempfile.mkdtemp(prefix="datasets-")
            weakref.finalize(self, shutil.rmtree, cache_dir, ignore_errors=True)
        self._open_split = partial(self._open, config_name, revision=revision, folder=str(cache_dir))
        self._eval_split = eval_split
        self._eval_share = eval_share if eval_split is None else 0.0
        self._stored_rows = self._open_split(split)
        self._rows = self._stored_rows.shuffle(seed=seed & 0xFFFF_FFFF_FFFF_FFFF, buffer_size=shuffle_buffer)
        self._restart()

    def batch(self, index: int) -> torch.Tensor:
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU.

        Raises:
            UserError: the text can no longer be read, or there is none.
        """
        if index < self._next_index:
            self._restart()
        size = self._batch_size * self._seq_len
        self._read(skip=(index - self._next_index) * size, want=size + 1)
        self._next_index = index + 1
        tokens = self._buffer[: size + 1].astype(np.int64)
        self._buffer = self._buffer[size:]  # the last label is the next batch's first input
        return blocks_of(tokens, range(self._batch_size), self._seq_len)

    def eval_batches(self, count: int) -> list[torch.Tensor]:
        """Returns up to `count` batches of the held-out text, as it is stored: int64 [batch_size, seq_len + 1].

        Reads from the beginning until there is enough. The last batch is smaller where there is too little; the list is
        empty where there is none. Raises UserError as `batch` does, and for an unknown `eval_split`.
        """
        if self._eval_split is None:
            documents = self._documents(self._stored_rows, held_out=True) if self._eval_share else ()
        else:
            documents = self._documents(self._open_split(self._eval_split, key="eval_split"))
        # One by one: more than needed would be read to fill a group.
        arrays = (array for document in documents for array in tokenise([document], self._tokenizer))
        wanted = count * self._batch_size * self._seq_len + 1
        tokens = concatenate(limit_tokens(arrays, wanted), self.vocab_size)
        available = max((len(tokens) - 1) // self._seq_len, 0)
        starts = range(0, available, self._batch_size)
        batches = [range(start, min(start + self._batch_size, available)) for start in starts]
        return [blocks_of(tokens, batch, self._seq_len) for batch in batches]

    def _open(self, config_name: str | None, split: str, revision: str | None, folder: str, key: str = "split") -> Any:
        rows = open_rows(
            self._name, config_name, split, revision=revision, folder=folder, split_key=key, otherwise=USE_LOCAL_FILES
        )
        check_column(self._text_column, columns_of(rows), self._name)
        return rows.select_columns([self._text_column])

    def _restart(self) -> None:
        """Starts again from the first row of the first epoch."""
        self._next_index = 0
        self._buffer = np.empty(0, dtype=token_dtype(self.vocab_size))
        self._arrays = self._all_epochs()

    def _read(self, *, skip: int, want: int) -> None:
        """Drops `skip` tokens, then reads until the buffer has at least `want`."""
        arrays = [self._buffer[skip:]]
        skip -= min(skip, len(self._buffer))
        num_tokens = len(arrays[0])
        while num_tokens < want:
            array = next(self._arrays)
            dropped = min(skip, len(array))
            skip -= dropped
            if dropped < len(array):  # an empty slice would keep its whole array in memory
                arrays.append(array[dropped:])
                num_tokens += len(array) - dropped
        self._buffer = np.concatenate(arrays)

    def _all_epochs(self) -> Iterator[np.ndarray]:
        """Yields arrays of tokens, epoch after epoch without end."""
        epoch = 0
        while True:
            self._rows.set_epoch(epoch)
            num_tokens = 0
            for array in limit_tokens(tokenise(self._documents(self._rows), self._tokenizer), self._max_tokens):
                num_tokens += len(array)
                yield array
            if not num_tokens:
                raise UserError(
                    f"dataset.name={self._name}: dataset.text_column={self._text_column} contains no text; "
                    "choose another column or dataset"
                )
            epoch += 1

    def _documents(self, rows: Any, held_out: bool = False) -> Iterator[tuple[str, bool]]:
        """Yields (text, True) for each of `rows` that has text, and that is held out or is not."""
        try:
            for row in rows:
                text = row[self._text_column]
                if is_text(text, self._text_column, self._name) and self._is_held_out(text) == held_out:
                    yield text, True
        except UserError:
            raise
        except Exception as error:  # network, Arrow and JSON libraries raise errors without a common base class
            raise UserError(
                f"dataset.name={self._name}: reading failed ({first_line(error)}); check the network and start again, "
                f"{USE_LOCAL_FILES}"
            ) from error

    def _is_held_out(self, text: str) -> bool:
        digest = hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).digest()
        return int.from_bytes(digest) < self._eval_share * 2**64
