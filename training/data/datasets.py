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

import hashlib
import itertools
import shutil
import tempfile
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.utils import get_class, instantiate
from omegaconf import DictConfig
from torch import nn

from training.config.declare import AUTO
from training.data.examples import RandomBatches, check_share
from training.data.hub_rows import columns_of, open_rows
from training.data.local_files import check_column, find_files, is_text, read_files, read_stdlib, refuse_trained
from training.data.packing import PackedTokens, blocks_of, concatenate, limit_tokens, random_words, tokenise
from training.data.tokenizer import load_tokenizer
from training.errors import UserError, as_user_error
from training.runs.files import DATASETS_FOLDER

__all__ = ["HubText", "StdlibText", "SyntheticTokens", "TextFiles"]

OTHERWISE = "or train on local files with dataset=text dataset.files=PATH"


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
            refuse_trained(eval_files, files)
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


class HubText:
    """Streams text of the Hugging Face Hub, or of a local folder with the same layout, without storing it.

    Each epoch shuffles the shards, and the rows through a buffer. Batches of increasing index are read one after
    another. A jump forward reads and drops what is in between; a jump back starts again from the first row. So
    resuming a long run reads its data once more. The batches are the same either way.

    Held out is a split of its own (`eval_split`), or the documents whose hash is in the first `eval_share` of all
    possible hashes. So no epoch has a held-out document, or another row with the same text, in whatever order it reads.
    conf/dataset/hub.yaml explains the keys.

    Raises UserError within seconds if there is no network or no such dataset, configuration, split or column; and while
    it reads, if a row cannot be used, or the network fails for longer than the retries of `datasets` last.
    """

    num_blocks = None
    reads_hub = True

    def __init__(
        self,
        name: str,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        config_name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        text_column: str = "text",
        tokenizer: str | None = None,
        begin: str | None = AUTO,
        end: str | None = AUTO,
        max_tokens: int | None = None,
        shuffle_buffer: int = 1000,
        eval_split: str | None = None,
        eval_share: float = 0.0,
        cache_dir: str | Path | None = None,
    ):
        self._tokenizer = load_tokenizer(tokenizer, begin, end)
        self.vocab_size = self._tokenizer.vocab_size
        if not name:
            raise UserError("dataset.name is empty: give dataset.name=OWNER/NAME, a dataset on huggingface.co")
        check_share(eval_share)
        if cache_dir is None:
            cache_dir = tempfile.mkdtemp(prefix="datasets-")
            weakref.finalize(self, shutil.rmtree, cache_dir, ignore_errors=True)
        self._name, self._text_column, self._max_tokens = name, text_column, max_tokens
        self._seq_len, self._batch_size = seq_len, batch_size
        self._config_name = config_name
        self._given = {"revision": revision, "folder": str(cache_dir), "otherwise": OTHERWISE}
        if eval_split in split.split("+"):
            raise UserError(f"dataset.eval_split={eval_split}: is trained on, as dataset.split={split}: name another")
        self._eval_split, self._eval_share = eval_split, eval_share if eval_split is None else 0.0
        self._stored = self._opened(split)
        self._rows = self._stored.shuffle(seed=seed & 0xFFFF_FFFF_FFFF_FFFF, buffer_size=shuffle_buffer)
        self._next_index, self._batches = 0, self._batches_in_order()

    def batch(self, index: int) -> torch.Tensor:
        """Returns batch `index` >= 0: int64 [batch_size, seq_len + 1] on the CPU. Raises UserError without text."""
        if index < self._next_index:
            self._next_index, self._batches = 0, self._batches_in_order()
        for _ in range(index - self._next_index):
            next(self._batches)
        self._next_index = index + 1
        return blocks_of(next(self._batches).astype(np.int64), range(self._batch_size), self._seq_len)

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

    def _batches_in_order(self) -> Iterator[np.ndarray]:
        """Yields the tokens of each batch; the last token of a batch, a label, is the first of the next, an input."""
        size = self._batch_size * self._seq_len
        arrays, count = [], 0
        for array in self._tokens():
            arrays.append(array)
            count += len(array)
            if count > size:
                tokens = np.concatenate(arrays)
                while len(tokens) > size:
                    yield tokens[: size + 1]
                    tokens = tokens[size:]
                arrays, count = [tokens], len(tokens)

    def _tokens(self) -> Iterator[np.ndarray]:
        """Yields the tokens of one epoch after the other, without end."""
        for epoch in itertools.count():
            self._rows.set_epoch(epoch)
            documents, is_empty = self._read(self._rows, held_out=False), True
            for array in limit_tokens(tokenise(documents, self._tokenizer), self._max_tokens):
                is_empty = False
                yield array
            if is_empty:
                problem = "contains no text; choose another column or dataset"
                raise UserError(f"dataset.name={self._name}: dataset.text_column={self._text_column} {problem}")

    def _opened(self, split: str, key: str = "split") -> Any:
        rows = open_rows(self._name, self._config_name, split, split_key=key, **self._given)
        check_column(self._text_column, columns_of(rows), self._name)
        return rows.select_columns([self._text_column])

    def _held_out(self) -> Iterator[tuple[str, bool]]:
        """Yields what is held out, as it is stored. Raises UserError for an unknown `eval_split`."""
        if self._eval_split is not None:
            return self._read(self._opened(self._eval_split, "eval_split"), held_out=False)
        return self._read(self._stored, held_out=True) if self._eval_share else iter(())

    def _read(self, rows: Any, held_out: bool) -> Iterator[tuple[str, bool]]:
        after = f"); check the network and start again, {OTHERWISE}"
        # Network, Arrow and JSON libraries raise errors without a common base class.
        with as_user_error(f"dataset.name={self._name}: reading failed (", Exception, after=after):
            for row in rows:
                text = row[self._text_column]
                if is_text(text, self._text_column, self._name) and self._is_held_out(text) == held_out:
                    yield text, True

    def _is_held_out(self, text: str) -> bool:
        if not self._eval_share:
            return False
        digest = hashlib.blake2b(text.encode("utf-8", errors="replace"), digest_size=8).digest()
        return int.from_bytes(digest) < self._eval_share * 2**64


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
