"""Datasets of chats: rows of files or of the Hub, rendered by a template, padded or packed."""

import hashlib
import logging
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from training.data.chats.conversations import Columns, conversation_of
from training.data.chats.kept import Kept
from training.data.chats.reading import Rows as RowsRead
from training.data.chats.reading import read_files, read_hub
from training.data.chats.rendering import Renderer, Sample
from training.data.chats.rows import PackedRows, PaddedRows, Rows, SampleTokens, meta_batch
from training.data.examples import check_share
from training.data.local_files import refuse_trained
from training.data.tokenizer import load_tokenizer
from training.errors import UserError

logger = logging.getLogger(__name__)


class OfMessages(ABC):
    """Examples of .jsonl, .json and .parquet files, or of a dataset of the Hub, kept in memory as tokens.

    conf/dataset/chat.yaml explains the keys. Which examples are held out is drawn by `seed` and the number of the
    example alone. `num_blocks` is the number of rows in an epoch, `longest` that of positions in the longest sample,
    `used_ids` one more than the largest id.

    Raises UserError if a row cannot be read or rendered, or nothing is left to train on.
    """

    reads_hub = True
    noun: ClassVar[str]
    more_columns: ClassVar[tuple[str, ...]] = ()
    parts: ClassVar[tuple[str, ...]] = ("",)
    """what the samples of an example are called beside its place"""

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
        too_long: str = "drop",
        eval_files: str | Sequence[str] | None = None,
        eval_share: float = 0.0,
        cache_dir: str | Path | None = None,
    ):
        check_share(eval_share)
        self._seq_len, self._sizes = seq_len, {"seed": seed, "batch_size": batch_size}
        self._tokenizer, self._template = load_tokenizer(tokenizer), template
        self._columns = Columns(columns, self.more_columns)
        self.vocab_size = self._tokenizer.vocab_size
        self._kept, others = Kept(seq_len, too_long), Kept(seq_len, too_long)
        with tempfile.TemporaryDirectory(prefix="datasets-") as folder:
            hub = name, config_name, split, revision, str(cache_dir or folder)
            examples = self._read(read_files(files) if name is None else read_hub(*hub), self._kept)
            if eval_files is not None:
                if name is None:
                    refuse_trained(eval_files, files)
                examples = chain(examples, self._read(read_files(eval_files, "dataset.eval_files"), others))
            samples = chain.from_iterable(examples)
            self._tokens = SampleTokens.of(samples, self.vocab_size, len(self.parts))
        self._trained, self._held_out = self._kept.divided(0.0 if eval_files is not None else eval_share, seed)
        if not len(self._trained):
            left_out = self._kept.left_out()
            raise UserError(
                f"dataset: nothing is left to train on of {self._kept.read:,} {self.noun}s"
                f"{f': {left_out}' if left_out else ', which are held out'}: give more {self.noun}s, a larger seq_len,"
                " or dataset.too_long=truncate"
            )
        for column, key in self._columns.unseen.items():
            raise UserError(f"dataset.columns.{key}={column}: no row has this column: name one that is there, or none")
        if eval_files is not None:
            self._held_out = np.arange(len(self._trained), len(self._tokens))
            if not len(self._held_out):
                raise UserError(
                    f"dataset.eval_files: nothing is left of {others.read:,} {self.noun}s: {others.left_out()}: give"
                    " others, or dataset.eval_files=null"
                )
        self._rows = self._rows_of(self._trained)
        self.num_blocks = self._rows.num_blocks
        self.longest = int(self._tokens.positions.max())
        self.used_ids = 1 + int(self._tokens.ids.max())

    @abstractmethod
    def _rendered(self, rows: RowsRead) -> Iterator[tuple[Sample, ...]]:
        """Yields the example of each row: as many samples as there are `parts`."""

    @abstractmethod
    def _rows_of(self, numbers: np.ndarray) -> Rows:
        """Makes the rows of some examples."""

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU, as `Rows.made` has it. Earlier calls do not change it."""
        return self._rows.batch(index)

    def eval_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns up to `count` batches of what is held out, the same at each call; none if nothing is."""
        return self._rows_of(self._held_out).some_batches(count) if len(self._held_out) else []

    def names(self, index: int) -> str:
        """Names the examples of batch `index` by file and row, for messages."""
        return self._rows.names(index, self._kept.place)

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of all tokens, of which are trained on, of where samples begin and of what is held out."""
        digest, tokens = hashlib.sha256(), self._tokens
        for part in (tokens.ids, tokens.trained, tokens.starts, self._held_out):
            digest.update(part.astype(part.dtype.newbyteorder("<"), copy=False))
        return digest.hexdigest()

    def facts(self) -> dict[str, str]:
        """Returns what one wants to know of the data before training on it, by label."""
        tokens, numbers = self._tokens, self._trained
        lengths = tokens.positions[numbers] + 1
        longest = int(numbers[int(lengths.argmax())])
        trained, total = (int(counts[numbers].sum()) for counts in (tokens.trained_counts, tokens.counts))
        rows, filled = self.num_blocks, self._rows.filled
        layout = (
            f"{rows:,} packed, {filled:.1%} filled"
            if isinstance(self._rows, PackedRows)
            else f"{rows:,} of a {self.noun} each, {1 - filled:.1%} of the positions are padding"
        )
        facts = {
            f"{self.noun}s to train on": f"{len(numbers):,}; {len(self._held_out):,} to evaluate on",
            "tokens": f"{total:,}, of which {trained:,} ({trained / total:.0%}) are trained on",
            f"longest {self.noun}": f"{int(lengths.max()):,} tokens ({self._kept.place(longest)})",
            "rows": layout,
        }
        if unread := self._columns.unread:
            facts["columns not read"] = ", ".join(unread)
        return facts | ({"left out": out} if (out := self._kept.left_out()) else {})

    def shown(self, count: int) -> Iterator[tuple[str, Sample]]:
        """Yields pairs (place, sample) of the first `count` examples that are trained on, in the order of the files."""
        for number in self._trained[:count].tolist():
            for part, sample in zip(self.parts, self._tokens.samples(number), strict=True):
                yield f"{self._kept.place(number)} {part}".rstrip(), sample

    def text_of(self, ids: np.ndarray) -> str:
        """Returns the text of tokens, special tokens too."""
        return self._tokenizer.pretrained.decode(ids.tolist(), skip_special_tokens=False)

    def _read(self, rows: RowsRead, kept: Kept) -> Iterator[tuple[Sample, ...]]:
        return kept.fitting(self._rendered(kept.reading(rows)))


class Chats(OfMessages):
    """Chats, each of which is one sample.

    A batch has `input_ids` and `labels`, int64 [rows, length], and `lengths`, int64 [rows]; `packed` rows have
    `segments`, int64 [rows, length], instead of `lengths`. The layouts of rows in files are in `conversations`; which
    tokens are trained on is in `rendering`.
    """

    noun = "chat"

    def __init__(
        self,
        files: str | Sequence[str] | None = None,
        *,
        train_on: str = "assistant",
        packed: bool = False,
        **keys: object,
    ):
        self._train_on, self._packed = train_on, packed
        super().__init__(files, **keys)
        self._warn_of_no_end()

    @staticmethod
    def meta_tokens(rows: int, seq_len: int, *, packed: bool = False, **keys: object) -> dict[str, Tensor]:
        """Returns the longest batch of so many rows, on the meta device; `keys` are others of the option."""
        extra = {"segments": (rows, seq_len)} if packed else {"lengths": (rows,)}
        return meta_batch(input_ids=(rows, seq_len), labels=(rows, seq_len), **extra)

    def _rendered(self, rows: RowsRead) -> Iterator[tuple[Sample]]:
        renderer = Renderer(self._tokenizer, self._template, self._train_on)
        conversations = (conversation_of(row, self._columns, place) for place, row in rows)
        return ((sample,) for sample in renderer.samples(conversations))

    def _rows_of(self, numbers: np.ndarray) -> Rows:
        if self._packed:
            return PackedRows(self._tokens, numbers, seq_len=self._seq_len, **self._sizes)
        return PaddedRows(self._tokens, numbers, **self._sizes)

    def _warn_of_no_end(self) -> None:
        """A model that never trains on a token that ends a text does not learn to stop."""
        stops = self._tokenizer.stops
        if not bool((np.isin(self._tokens.ids, list(stops)) & self._tokens.trained).any()):
            logger.warning(
                "no token that is trained on ends a text (%s): the model will not learn to stop; mark it in the"
                " template, or give dataset.train_on=all",
                ", ".join(repr(self.text_of(np.array([number]))) for number in sorted(stops)),
            )
