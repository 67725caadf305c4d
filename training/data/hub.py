"""A dataset that streams text from the Hugging Face Hub."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from training.config.declare import AUTO
from training.data.corpus import is_text
from training.data.hub_rows import HubStream
from training.data.packing import blocks_of, concatenate, limit_tokens, tokenise
from training.data.tokenizer import load_tokenizer


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
        *,
        seq_len: int,
        text_column: str = "text",
        tokenizer: str | None = None,
        begin: str | None = AUTO,
        end: str | None = AUTO,
        max_tokens: int | None = None,
        **stream: Any,
    ):
        self._tokenizer = load_tokenizer(tokenizer, begin, end)
        self.vocab_size = self._tokenizer.vocab_size
        self._text_column, self._max_tokens, self._seq_len = text_column, max_tokens, seq_len
        super().__init__(name, {"text_column": text_column}, **stream)

    def batch(self, index: int) -> torch.Tensor:
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU.

        Raises UserError if the text can no longer be read, or there is none.
        """
        return blocks_of(self._part_of(index).astype(np.int64), range(self._batch_size), self._seq_len)

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

    def _of_epoch(self, number: int) -> Iterator[np.ndarray]:
        return limit_tokens(tokenise(self._epoch(number), self._tokenizer), self._max_tokens)

    def _parts_of_batches(self, stream: Iterator[np.ndarray]) -> Iterator[np.ndarray]:
        """Yields the tokens of each batch; the last label of one is the first input of the next."""
        size = self._batch_size * self._seq_len
        arrays, count = [], 0
        for array in stream:
            arrays.append(array)
            count += len(array)
            if count > size:
                tokens = np.concatenate(arrays)
                while len(tokens) > size:
                    yield tokens[: size + 1]
                    tokens = tokens[size:]
                arrays, count = [tokens], len(tokens)

    @property
    def _nothing(self) -> str:
        return f"dataset.text_column={self._text_column} contains no text; choose another column or dataset"

    def _example(self, row: dict[str, Any]) -> tuple[bytes, tuple[str, bool]] | None:
        text = row[self._text_column]
        if not is_text(text, self._text_column, self._name):
            return None
        return text.encode("utf-8", errors="replace"), (text, True)
