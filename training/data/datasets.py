"""The datasets that Hydra builds from the `dataset` config group.

Every dataset has:

* `batch(index)`: int64 [batch_size, seq_len + 1] on the CPU; inputs are `[:, :-1]`, labels `[:, 1:]`. It is a pure
  function of the dataset, the seed and the index. Earlier calls, the process, its threads and the machine do not
  change it.
* `vocab_size`: all token ids are below it. The model's vocabulary must be at least as large; `used_ids`, where all
  tokens are in memory, suffices where the tokenizer is the model's own.
* `num_blocks`: the sequences in one epoch; None where that is unknown or endless.
* `eval_batches(count)`: up to `count` batches of the held-out split, the same at each call. No token of theirs is a
  label in `batch`, however often or seldom the run evaluates. Empty if the split is too small for a sequence.
* `data_sha256`, where all tokens are in memory: resuming compares it, to see whether the text has changed.

All take `seed` and `batch_size`, those of text `seq_len`, and those with `reads_hub` a `cache_dir` for files that the
Hub's client writes; None uses a temporary folder, which is removed.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig
from torch import nn

from training.config.declare import AUTO
from training.data.examples import RandomBatches
from training.data.hub_rows import HubStream
from training.data.local_files import find_files, is_text, read_files, read_stdlib
from training.data.packing import PackedTokens, blocks_of, concatenate, limit_tokens, random_words, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError
from training.runs.files import DATASETS_FOLDER

__all__ = ["HubText", "StdlibText", "SyntheticTokens", "TextFiles"]


class StdlibText(PackedTokens):
    """The source files of the running Python's standard library: 11 MB of real text that every machine has.

    The text depends on the Python release: 3.11 and 3.12 train on different batches. conf/dataset/stdlib.yaml explains
    the keys. Raises UserError if this Python has no source files, or `max_tokens` is below one block.
    """

    def __init__(
        self,
        *,
        tokenizer: str | None = None,
        begin: str | None = AUTO,
        end: str | None = AUTO,
        max_tokens: int | None = None,
        **packing: Any,
    ):
        encoder = load_tokenizer(tokenizer, begin, end)
        arrays = limit_tokens(tokenise(read_stdlib(), encoder), max_tokens)
        super().__init__(concatenate(arrays, encoder.vocab_size), vocab_size=encoder.vocab_size, **packing)


class TextFiles(PackedTokens):
    """Local .txt, .jsonl, .json and .parquet files, kept in memory as tokens (two or four bytes each).

    conf/dataset/text.yaml explains the keys. Raises UserError if a file is missing or unreadable, or too short.
    """

    def __init__(
        self,
        files: str | Sequence[str],
        *,
        text_column: str = "text",
        tokenizer: str | None = None,
        begin: str | None = AUTO,
        end: str | None = AUTO,
        max_tokens: int | None = None,
        eval_files: str | Sequence[str] | None = None,
        **packing: Any,
    ):
        encoder = load_tokenizer(tokenizer, begin, end)
        pieces = read_files(find_files(files), text_column)
        held_out = None
        if eval_files is not None:
            key = "dataset.eval_files"
            others = tokenise(read_files(find_files(eval_files, key), text_column, key), encoder)
            held_out = concatenate(others, encoder.vocab_size)
        tokens = concatenate(limit_tokens(tokenise(pieces, encoder), max_tokens), encoder.vocab_size)
        super().__init__(tokens, vocab_size=encoder.vocab_size, held_out=held_out, **packing)


class SyntheticTokens(RandomBatches):
    """Random tokens, new ones in every batch, to measure speed. Raises UserError for a vocab_size below 1."""

    def __init__(self, vocab_size: int = 256, *, seed: int, seq_len: int, batch_size: int):
        if vocab_size < 1:
            raise UserError(f"dataset.vocab_size={vocab_size}: must be at least 1")
        self.vocab_size, self._seed = vocab_size, seed
        self._shape = (batch_size, seq_len + 1)

    def _drawn(self, *key: int) -> torch.Tensor:
        words = random_words(self._shape[0] * self._shape[1], self._seed, *key)
        tokens = words % np.uint64(self.vocab_size)
        return torch.from_numpy(tokens.astype(np.int64).reshape(self._shape))


class HubText(HubStream):
    """Streams text, as `HubStream` does; conf/dataset/hub.yaml explains the keys."""

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
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU. Raises UserError without text."""
        return blocks_of(self._part_of(index).astype(np.int64), range(self._batch_size), self._seq_len)

    def eval_batches(self, count: int) -> list[torch.Tensor]:
        """Returns up to `count` batches of held-out text: int64 [rows, seq_len + 1] on the CPU. Raises as `batch`."""
        # Document by document: `tokenise` would read more than is needed, to fill a group of documents.
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
        """Yields the tokens of each batch; the last token of a batch, a label, is the first of the next, an input."""
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


def build_dataset(config: DictConfig, model: nn.Module, run_dir: Path):
    """Makes the dataset of `config`; the cache of one from the Hub goes under `run_dir`.

    Random tokens have the vocabulary of `model`. Raises UserError as the dataset's class does, and for a model without
    a vocabulary.
    """
    made = get_class(config.dataset._target_)
    sizes = {"seed": config.seed, "batch_size": config.batch_size}
    if not hasattr(made, "meta_batch"):
        sizes["seq_len"] = config.seq_len
    if getattr(made, "reads_hub", False):
        sizes["cache_dir"] = run_dir / DATASETS_FOLDER
    if "vocab_size" in config.dataset and config.dataset.vocab_size is None:
        if not hasattr(model, "vocab_size"):
            raise UserError(
                f"dataset.vocab_size=null: {type(model).__name__} has no vocabulary: choose a dataset of images, and"
                " task=flow_matching or classification"
            )
        sizes["vocab_size"] = model.vocab_size
    return instantiate(config.dataset, **sizes)


def has_facts(config: DictConfig) -> bool:
    """Tells whether the dataset of `config` has `facts` about its data; a plan reads the data to show them."""
    return hasattr(get_class(config.dataset._target_), "facts")


def facts_of(dataset: object) -> Mapping[str, str]:
    """Returns the facts of a dataset about its data, by label, such as the number of pictures; {} if it has none."""
    return dataset.facts() if hasattr(dataset, "facts") else {}
