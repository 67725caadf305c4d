"""A dataset that streams text from the Hugging Face Hub."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from training.config.declare import AUTO
from training.data.corpus import is_text
from training.data.hub_rows import HubStream
from training.data.packing import blocks_of, concatenate, limit_tokens, token_dtype, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError


class HubText(HubStream):
    """Streams text, as `HubStream` does. Args that it has not:

    Args:
        text_column: the column that contains the text.
        tokenizer: a tokenizer.json, a folder or a model of the Hub with one; None for bytes.
        begin, end: the token before and after each document; auto: as the tokenizer says; None: none.
        max_tokens: tokens in an epoch, counted from its shuffled start; None for all.
    """

    otherwise = "or train on local files with dataset=text dataset.files=PATH"

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
        self._tokenizer = load_tokenizer(tokenizer, begin, end)
        self.vocab_size = self._tokenizer.vocab_size
        self._text_column, self._max_tokens = text_column, max_tokens
        self._seq_len, self._batch_size = seq_len, batch_size
        super().__init__(
            name,
            config_name,
            split,
            revision,
            {"text_column": text_column},
            seed=seed,
            shuffle_buffer=shuffle_buffer,
            eval_split=eval_split,
            eval_share=eval_share,
            cache_dir=cache_dir,
        )
        self._restart()

    def batch(self, index: int) -> torch.Tensor:
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU.

        Raises:
            UserError: the text can no longer be read, or there is none.
        """
        if index < self._next_index:
            self._restart()
        size = self._batch_size * self._seq_len
        self._advance(skip=(index - self._next_index) * size, want=size + 1)
        self._next_index = index + 1
        tokens = self._buffer[: size + 1].astype(np.int64)
        self._buffer = self._buffer[size:]  # the last label is the next batch's first input
        return blocks_of(tokens, range(self._batch_size), self._seq_len)

    def eval_batches(self, count: int) -> list[torch.Tensor]:
        """Returns up to `count` batches of the held-out text, as it is stored: int64 [batch_size, seq_len + 1].

        Reads from the beginning until there is enough. The last batch is smaller where there is too little; the list is
        empty where there is none. Raises UserError as `batch` does, and for an unknown `eval_split`.
        """
        # One by one: more than needed would be read to fill a group.
        arrays = (array for document in self._held_out() for array in tokenise([document], self._tokenizer))
        wanted = count * self._batch_size * self._seq_len + 1
        tokens = concatenate(limit_tokens(arrays, wanted), self.vocab_size)
        available = max((len(tokens) - 1) // self._seq_len, 0)
        starts = range(0, available, self._batch_size)
        batches = [range(start, min(start + self._batch_size, available)) for start in starts]
        return [blocks_of(tokens, batch, self._seq_len) for batch in batches]

    def _restart(self) -> None:
        """Starts again from the first row of the first epoch."""
        self._next_index = 0
        self._buffer = np.empty(0, dtype=token_dtype(self.vocab_size))
        self._arrays = self._all_epochs()

    def _advance(self, *, skip: int, want: int) -> None:
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
            num_tokens = 0
            for array in limit_tokens(tokenise(self._epoch(epoch), self._tokenizer), self._max_tokens):
                num_tokens += len(array)
                yield array
            if not num_tokens:
                raise UserError(
                    f"dataset.name={self._name}: dataset.text_column={self._text_column} contains no text; "
                    "choose another column or dataset"
                )
            epoch += 1

    def _example(self, row: dict[str, Any]) -> tuple[bytes, tuple[str, bool]] | None:
        text = row[self._text_column]
        if not is_text(text, self._text_column, self._name):
            return None
        return text.encode("utf-8", errors="replace"), (text, True)
