"""Datasets that Hydra builds from the `dataset` config group.

Each has `batch(index)`: int64 [batch_size, seq_len + 1] on the CPU (inputs are `[:, :-1]`, labels `[:, 1:]`), a pure
function of the dataset, the seed and the index: not of the batches asked for before, the process, its threads or the
machine. Each has `vocab_size`, which the model's must not be below, and `num_blocks`, the sequences in one epoch
(None where that is not known or has no end). `cache_dir` is a folder for what `datasets` insists to write, for HubText
the metadata of the repository; None takes a temporary folder that is removed.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from training.data.corpus import find_files, read_files, read_stdlib
from training.data.hub import HubText
from training.data.packing import PackedTokens, pack, random_words, take, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError

__all__ = ["HubText", "StdlibText", "SyntheticTokens", "TextFiles"]


class StdlibText(PackedTokens):
    """The source files of the running Python's standard library: real text that is always there, 11 MB of it.

    The text is that of one Python release: 3.11 and 3.12 train on different batches.

    Args:
        tokenizer: a Hugging Face tokenizers JSON file; None for bytes.
        max_tokens: tokens to use, in the order of paths; None for all.
    """

    def __init__(
        self,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        tokenizer: str | None = None,
        max_tokens: int | None = None,
        cache_dir: str | Path | None = None,
    ):
        reader = load_tokenizer(tokenizer)
        arrays = take(tokenise(read_stdlib(cache_dir), reader), max_tokens)
        super().__init__(
            pack(arrays, reader.vocab_size),
            vocab_size=reader.vocab_size,
            seed=seed,
            seq_len=seq_len,
            batch_size=batch_size,
        )


class TextFiles(PackedTokens):
    """Local .txt, .jsonl, .json and .parquet files, held in memory as tokens (two or four bytes each).

    Args:
        files: paths and glob patterns, relative to the current folder.
        text_column: the column that holds the text, in files that have columns.
        tokenizer: a Hugging Face tokenizers JSON file; None for bytes.
        max_tokens: tokens to use, in the order of `files`, reading no further; None for all.

    Raises:
        UserError: files that are missing, unreadable or too short; see training.data.corpus.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        text_column: str = "text",
        tokenizer: str | None = None,
        max_tokens: int | None = None,
        cache_dir: str | Path | None = None,
    ):
        reader = load_tokenizer(tokenizer)
        texts = read_files(find_files(files), text_column, cache_dir)
        super().__init__(
            pack(take(tokenise(texts, reader), max_tokens), reader.vocab_size),
            vocab_size=reader.vocab_size,
            seed=seed,
            seq_len=seq_len,
            batch_size=batch_size,
        )


class SyntheticTokens:
    """Uniformly random tokens, new ones in every batch: for measuring speed, where the loss means nothing.

    Args:
        vocab_size: ids are below this.
        cache_dir: taken because every dataset takes it; nothing is written.
    """

    num_blocks = None

    def __init__(
        self,
        vocab_size: int = 256,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        cache_dir: str | Path | None = None,
    ):
        if vocab_size < 1:
            raise UserError(f"dataset.vocab_size={vocab_size}: must be at least 1")
        self.vocab_size = vocab_size
        self._seed = seed
        self._shape = (batch_size, seq_len + 1)

    def batch(self, index: int) -> torch.Tensor:
        """Batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU."""
        words = random_words(self._shape[0] * self._shape[1], self._seed, index)
        tokens = words % np.uint64(self.vocab_size)
        return torch.from_numpy(tokens.astype(np.int64).reshape(self._shape))
