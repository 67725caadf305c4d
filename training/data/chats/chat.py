"""The dataset of chats: rows of files or of the Hub, rendered by a template, padded or packed."""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np
from torch import Tensor

from training.data.chats.conversations import Columns, Conversation, conversation_of
from training.data.chats.kept import Fitting, KeptSamples
from training.data.chats.reading import Rows as RowsRead
from training.data.chats.reading import read_files, read_hub
from training.data.chats.rendering import Renderer, Sample
from training.data.chats.rows import PackedRows, PaddedRows, Rows, SampleTokens, meta_rows
from training.data.examples import check_share
from training.data.tokenizer import load_tokenizer
from training.errors import UserError

logger = logging.getLogger(__name__)


class Chats:
    """Chats of .jsonl, .json and .parquet files, or of a dataset of the Hub, kept in memory as tokens.

    Give `files`, or `name` and what belongs to it. `training.data.chats.conversations` has the layouts of rows,
    `training.data.chats.rendering` what is trained on.

    Args:
        files: paths and glob patterns, relative to the current folder.
        name, config_name, split, revision: a dataset of the Hub, or a local folder of its layout.
        columns: {what a column is: its name}, where names are others.
        template: a file with a template of Jinja; None: the tokenizer's.
        tokenizer: as `load_tokenizer` takes it.
        train_on: assistant, last or all.
        too_long: what becomes of a sample of more than seq_len + 1 tokens: drop, truncate or refuse.
        packed: several samples share a row of seq_len positions, and do not see each other; else each has a row.
        eval_files: chats to evaluate on.
        eval_share: the share of the samples that is held out where `eval_files` is None: those of the smallest random
            words, which depend on seed and number alone.

    Attributes:
        num_blocks: rows of an epoch.
        longest: positions of the longest sample.

    Raises:
        UserError: a row cannot be read or rendered, or nothing is left to train on.
    """

    def __init__(
        self,
        files: str | Sequence[str] | None = None,
        *,
        seed: int,
        seq_len: int,
        batch_size: int,
        name: str | None = None,
        config_name: str | None = None,
        split: str = "train",
        revision: str | None = None,
        columns: Mapping[str, str | None] | None = None,
        template: str | None = None,
        tokenizer: str | None = None,
        train_on: str = "assistant",
        too_long: str = "drop",
        packed: bool = False,
        eval_files: str | Sequence[str] | None = None,
        eval_share: float = 0.0,
        cache_dir: str | Path | None = None,
    ):
        check_share(eval_share)
        encoder = load_tokenizer(tokenizer)
        self.vocab_size = encoder.vocab_size
        self._stops = encoder.stops
        self._renderer = Renderer(encoder, template, train_on)
        self._decode = encoder.pretrained.decode
        self._columns = Columns(columns)
        self._fitting = Fitting(seq_len, too_long)
        self._sizes = {"seed": seed, "batch_size": batch_size, **({"seq_len": seq_len} if packed else {})}
        self._of_rows = PackedRows if packed else PaddedRows
        cache = tempfile.TemporaryDirectory(prefix="datasets-") if cache_dir is None else None
        try:
            self._samples = self._kept(
                rows_of(files, name, config_name, split, revision, str(cache.name if cache else cache_dir))
            )
        finally:
            if cache is not None:
                cache.cleanup()
        training, held_out = self._samples.divided(0.0 if eval_files is not None else eval_share, seed)
        if not len(training):
            raise UserError(
                f"dataset: nothing is left to train on of {self._samples.read:,} chats"
                f"{self._samples.left_out(seq_len) or ', which are held out'}: give more chats, a larger seq_len, or"
                " dataset.too_long=truncate"
            )
        self._training = self._made(self._samples.tokens, training)
        self.num_blocks = self._training.num_blocks
        self.longest = int(self._samples.tokens.positions[training].max())
        self._evaluating: Rows | None = self._made(self._samples.tokens, held_out) if len(held_out) else None
        self._evaluated = len(held_out)
        if eval_files is not None:
            others = self._kept(read_files(eval_files, "dataset.eval_files"))
            if not len(others.tokens):
                raise UserError(
                    f"dataset.eval_files: nothing is left of {others.read:,} chats{others.left_out(seq_len)}: give"
                    " others, or dataset.eval_files=null"
                )
            self._evaluating = self._made(others.tokens, np.arange(len(others.tokens)))
            self._evaluated = len(others.tokens)
            self.longest = max(self.longest, int(others.tokens.positions.max()))
        self._trained_numbers = training
        self._warn_of_no_end()

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU, int64: `input_ids` and `labels` [rows, length], and more.

        That is `lengths` [rows] of rows of one sample, `segments` [rows, length] of packed ones.
        """
        return self._training.batch(index)

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns up to `count` batches of what is held out, the same at each call; none if nothing is."""
        return [] if self._evaluating is None else self._evaluating.some_batches(count)

    def names(self, index: int) -> str:
        """Names the samples of batch `index` by file and row, for messages."""
        return self._training.names(index, self._samples.place)

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of all tokens, of which are trained on and of where samples begin."""
        digest, tokens = hashlib.sha256(), self._samples.tokens
        for part in (tokens.ids, tokens.trained, tokens.starts):
            digest.update(part.astype(part.dtype.newbyteorder("<"), copy=False))
        return digest.hexdigest()

    @staticmethod
    def meta_tokens(rows: int, seq_len: int, *, packed: bool = False, **keys: object) -> dict[str, Tensor]:
        """Returns the longest batch of so many rows, on the meta device; `keys` are others of the option."""
        return meta_rows(rows, seq_len, packed=packed)

    def facts(self) -> dict[str, str]:
        """Returns what one wants to know of the data before training on it, by label."""
        tokens, numbers = self._samples.tokens, self._trained_numbers
        lengths = tokens.positions[numbers] + 1
        longest = int(numbers[int(lengths.argmax())])
        trained = int(np.add.reduceat(tokens.trained, tokens.starts[:-1], dtype=np.int64)[numbers].sum())
        total = int(lengths.sum())
        rows, filled = self.num_blocks, self._training.filled
        layout = (
            f"{rows:,} packed, {filled:.1%} filled"
            if self._of_rows is PackedRows
            else f"{rows:,} of a sample each, {1 - filled:.1%} of the positions are padding"
        )
        facts = {
            "chats to train on": f"{len(numbers):,}; {self._evaluated:,} to evaluate on",
            "tokens": f"{total:,}, of which {trained:,} ({trained / total:.0%}) are trained on",
            "longest chat": f"{int(lengths.max()):,} tokens ({self._samples.place(longest)})",
            "rows": layout,
        }
        if out := self._samples.left_out(self._fitting.seq_len).removeprefix(": "):
            facts["left out"] = out
        return facts

    def shown(self, count: int) -> Iterator[tuple[str, Sample]]:
        """Yields pairs (place, sample) of the first `count` samples that are trained on, in the order of the rows."""
        for number in self._trained_numbers[:count].tolist():
            yield self._samples.place(number), self._samples.tokens.sample(number)

    def text_of(self, ids: np.ndarray) -> str:
        """Returns the text of tokens, special tokens too."""
        return self._decode(ids.tolist(), skip_special_tokens=False)

    def _made(self, tokens: SampleTokens, numbers: np.ndarray) -> Rows:
        return self._of_rows(tokens, numbers, **self._sizes)

    def _kept(self, rows: RowsRead) -> KeptSamples:
        kept = KeptSamples()

        def conversations() -> Iterator[Conversation]:
            for place, row in rows:
                kept.add_place(place)
                yield conversation_of(row, self._columns, place)

        fitting = self._fitting.samples(self._renderer.samples(conversations()), kept)
        kept.tokens = SampleTokens.of(fitting, self.vocab_size)
        return kept

    def _warn_of_no_end(self) -> None:
        """A model that never trains on a token that ends a text does not learn to stop."""
        tokens = self._samples.tokens
        ends = np.isin(tokens.ids, list(self._stops))
        if not bool((ends & tokens.trained).any()):
            logger.warning(
                "no token that is trained on ends a text (%s): the model will not learn to stop; mark it in the"
                " template, or give dataset.train_on=all",
                ", ".join(repr(self.text_of(np.array([number]))) for number in sorted(self._stops)),
            )


def rows_of(
    files: str | Sequence[str] | None,
    name: str | None,
    config_name: str | None,
    split: str,
    revision: str | None,
    folder: str,
) -> RowsRead:
    """Reads the rows of local files or of the Hub, whichever is given. Raises UserError if not one of them is."""
    if (files is None) == (name is None):
        given = "neither is given" if files is None else f"dataset.files={files} dataset.name={name} are both given"
        raise UserError(f"{given}: give dataset.files=PATH, or dataset.name=OWNER/NAME of the Hub")
    return read_files(files) if name is None else read_hub(name, config_name, split, revision, folder)
