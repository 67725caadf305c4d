"""The dataset of preferences: pairs of answers as rows of tokens, the chosen one first."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from models.loss import IGNORED_LABEL
from training.batches import Batch
from training.data.chats.chat import rows_of
from training.data.chats.conversations import Columns
from training.data.chats.kept import HELD_OUT, TOO_LONG
from training.data.chats.pairs import COLUMNS, Pair, PairRenderer, PairSample, pair_of
from training.data.chats.reading import Rows, read_files
from training.data.chats.rendering import Sample
from training.data.chats.rows import PaddedRows
from training.data.examples import check_share
from training.data.packing import random_words
from training.data.tokenizer import load_tokenizer
from training.errors import UserError


@dataclass
class PairTokens:
    """Pairs, and where each was."""

    pairs: list[PairSample] = field(default_factory=list)
    places: list[str] = field(default_factory=list)

    @property
    def positions(self) -> np.ndarray:
        """The positions that each pair takes in a row, those of its longer answer: int64 [pairs]."""
        return np.array([max(len(pair.chosen), len(pair.rejected)) - 1 for pair in self.pairs], dtype=np.int64)


class PairRows(PaddedRows):
    """Rows of one pair each; a batch is as long as its longest answer, and has pairs of about the same length."""

    def made(self, rows: Sequence[int]) -> Batch:
        numbers = self._numbers[list(rows)]
        longest = int(self._lengths[list(rows)].max())
        ids = torch.zeros(len(rows), 2, longest, dtype=torch.int64)
        labels = torch.full_like(ids, IGNORED_LABEL)
        lengths = torch.zeros(len(rows), 2, dtype=torch.int64)
        for row, number in enumerate(numbers):
            pair = self._tokens.pairs[number]
            for place, answer in enumerate((pair.chosen, pair.rejected)):
                tokens = torch.from_numpy(answer.astype(np.int64))
                # Label p is the token after input p, and the first token follows none.
                first, size = max(pair.start - 1, 0), len(tokens) - 1
                ids[row, place, :size] = tokens[:-1]
                labels[row, place, first:size] = tokens[first + 1 :]
                lengths[row, place] = size
        return {"input_ids": ids, "labels": labels, "lengths": lengths, "index": torch.from_numpy(numbers.copy())}


class Preferences:
    """Pairs of answers of local files or of the Hub, kept in memory as tokens.

    A batch has `input_ids` and `labels`, int64 [pairs, 2, L], the chosen answer first; labels of the prompt and of
    padding, which is at the end, are -100. It also has `lengths` int64 [pairs, 2], and `index` int64 [pairs], the
    numbers of the samples. L is the longest of the batch.

    Args:
        files: paths and patterns of .jsonl, .json and .parquet files, relative to the current folder.
        name, config_name, split, revision: a dataset of the Hub in their place.
        columns: {prompt, chosen, rejected, system, tools or chat_template_kwargs: the name of that column}.
        template: a file with a template of Jinja; None for the tokenizer's own.
        tokenizer: see `load_tokenizer`.
        too_long: what becomes of pairs with an answer that ends beyond `seq_len` + 1 tokens: drop, truncate or refuse.
        eval_files: files of pairs to evaluate on.
        eval_share: without these, the share of the pairs, drawn at random, that is held out.

    Raises:
        UserError: files or rows that cannot be read, or no pair is left.
    """

    has_pairs: ClassVar[bool] = True

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
        if too_long not in TOO_LONG:
            raise UserError(f"dataset.too_long={too_long}: must be {', '.join(TOO_LONG[:-1])} or {TOO_LONG[-1]}")
        self._seq_len, self._too_long = seq_len, too_long
        encoder = load_tokenizer(tokenizer)
        self.vocab_size, self._decode = encoder.vocab_size, encoder.pretrained.decode
        self._columns, self._renderer = Columns(columns, COLUMNS), PairRenderer(encoder, template)
        self._left_out = {"are too long": 0, "have equal answers": 0, "have an answer without tokens": 0}
        self._truncated = 0
        self._tokens = PairTokens()
        with tempfile.TemporaryDirectory(prefix="datasets-") as folder:
            self._take(rows_of(files, name, config_name, split, revision, str(cache_dir or folder)))
        count = len(self._tokens.pairs)
        held = 0 if eval_files is not None else int(count * eval_share)
        if count <= held:
            raise UserError(
                f"dataset: no pair is left to train on{self._left_out_text(': ')}: give more pairs, a larger seq_len,"
                " or dataset.too_long=truncate"
            )
        drawn = np.argsort(random_words(count, seed, HELD_OUT), kind="stable")
        self._trained, self._held_out = np.sort(drawn[held:]), np.sort(drawn[:held])
        if eval_files is not None:
            self._take(read_files(eval_files, "dataset.eval_files"))
            self._held_out = np.arange(count, self.num_samples)
        self._sizes = {"seed": seed, "batch_size": batch_size}
        self._rows = PairRows(self._tokens, self._trained, **self._sizes)
        self.num_blocks = self._rows.num_blocks

    @property
    def num_samples(self) -> int:
        """The pairs that are trained on and those that are held out."""
        return len(self._tokens.pairs)

    @cached_property
    def data_sha256(self) -> str:
        """The SHA-256 of all pairs, and of which are held out."""
        digest = hashlib.sha256(self._held_out.astype("<i8").tobytes())
        for pair in self._tokens.pairs:
            sizes = np.array([len(pair.chosen), len(pair.rejected), pair.start], "<i8")
            for part in (sizes, pair.chosen.astype("<u4"), pair.rejected.astype("<u4")):
                digest.update(part.tobytes())
        return digest.hexdigest()

    def batch(self, index: int) -> Batch:
        """Returns batch `index` >= 0 on the CPU. Earlier calls do not change it."""
        return self._rows.batch(index)

    def eval_batches(self, count: int) -> list[Batch]:
        """Returns up to `count` batches of held-out pairs, spread evenly, the same at each call; none if none are."""
        held = self._held_out
        return PairRows(self._tokens, held, **self._sizes).some_batches(count) if len(held) else []

    def every_sample(self, rows: int) -> Iterator[Batch]:
        """Yields all pairs, also those held out, in batches of `rows` of like length."""
        everything = PairRows(self._tokens, np.arange(self.num_samples), seed=0, batch_size=rows)
        numbers = everything.spread(self.num_samples)
        for start in range(0, len(numbers), rows):
            yield everything.made(numbers[start : start + rows])

    def names(self, index: int) -> str:
        """Names the pairs of batch `index` by file and row, for messages."""
        return self._rows.names(index, self._tokens.places.__getitem__)

    def facts(self) -> dict[str, str]:
        """Returns what one wants to know of the data before training on it, by label."""
        pairs = [self._tokens.pairs[number] for number in self._trained]
        total = sum(len(pair.chosen) + len(pair.rejected) for pair in pairs)
        answers = total - sum(2 * pair.start for pair in pairs)
        lengths = self._tokens.positions[self._trained] + 1
        longest = int(lengths.argmax())
        facts = {
            "pairs to train on": f"{self.num_blocks:,}; {len(self._held_out):,} to evaluate on",
            "tokens": f"{total:,}, of which {answers:,} ({answers / total:.0%}) are answers",
            "longest answer": f"{lengths[longest]:,} tokens, with its prompt"
            f" ({self._tokens.places[self._trained[longest]]})",
            "rows": f"{1 - self._rows.filled:.1%} of the positions are padding beside the longer answer",
        }
        return facts | ({"left out": out} if (out := self._left_out_text()) else {})

    def shown(self, count: int) -> Iterator[tuple[str, Sample]]:
        """Yields pairs (place, sample) of the answers of the first `count` pairs that are trained on."""
        for number in self._trained[:count].tolist():
            pair = self._tokens.pairs[number]
            for name, ids in (("chosen", pair.chosen), ("rejected", pair.rejected)):
                yield f"{self._tokens.places[number]} {name}", Sample(ids, np.arange(len(ids)) >= pair.start)

    def text_of(self, ids: np.ndarray) -> str:
        """Returns the text of tokens, special tokens too."""
        return self._decode(ids.tolist(), skip_special_tokens=False)

    @staticmethod
    def meta_tokens(rows: int, seq_len: int, **keys: Any) -> dict[str, Tensor]:
        """Returns a batch as `batch` does, on the meta device and of the longest pairs."""
        tokens = torch.empty(rows, 2, seq_len, dtype=torch.int64, device="meta")
        few = {"lengths": tokens.new_empty(rows, 2), "index": tokens.new_empty(rows)}
        return {"input_ids": tokens, "labels": torch.empty_like(tokens), **few}

    def _take(self, rows: Rows) -> None:
        """Renders rows, and keeps the pairs that can be trained on."""
        places: list[str] = []

        def pairs() -> Iterator[Pair]:
            for place, row in rows:
                places.append(place)
                yield pair_of(row, self._columns, place)

        for number, pair in enumerate(self._renderer.samples(pairs())):
            if (why := self._why_not(pair, places[number])) is not None:
                self._left_out[why] += 1
                continue
            most = self._seq_len + 1
            self._truncated += max(len(pair.chosen), len(pair.rejected)) > most
            self._tokens.pairs.append(PairSample(pair.chosen[:most], pair.rejected[:most], pair.start))
            self._tokens.places.append(places[number])

    def _why_not(self, pair: PairSample, place: str) -> str | None:
        """Says why a pair is left out; None if it is not. Raises UserError for one to refuse."""
        most, longest = self._seq_len + 1, max(len(pair.chosen), len(pair.rejected))
        if longest > most and self._too_long == "refuse":
            raise UserError(
                f"{place}: {longest:,} tokens are more than seq_len + 1 = {most:,}: give a larger seq_len, or"
                " dataset.too_long=drop or truncate"
            )
        if longest > most and self._too_long == "drop":
            return "are too long"
        chosen, rejected = pair.chosen[:most], pair.rejected[:most]
        # The first token is nobody's label.
        if min(len(chosen), len(rejected)) <= max(pair.start, 1):
            return "have an answer without tokens"
        return "have equal answers" if np.array_equal(chosen, rejected) else None

    def _left_out_text(self, before: str = "") -> str:
        """Says what was left out or cut, after `before`; empty if nothing was."""
        counts = {**self._left_out, "are cut, too long": self._truncated}
        text = ", ".join(f"{count:,} {why}" for why, count in counts.items() if count)
        return text and before + text
