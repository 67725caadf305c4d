"""Which samples are kept: where each was, what was left out, and which of them are held out."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from training.data.chats.rendering import Sample
from training.data.chats.rows import SampleTokens
from training.data.packing import random_words
from training.errors import UserError

TOO_LONG = ("drop", "truncate", "refuse")
# In the key of random words: which samples are held out.
HELD_OUT = 2


@dataclass
class KeptSamples:
    """The samples that are kept, the rows that were read, and what was left out."""

    tokens: SampleTokens = field(init=False)
    read: int = 0
    dropped: int = 0
    truncated: int = 0
    untrained: int = 0
    # Of each row that was read: its file, as an index of `files`, and what it is called there.
    files: dict[str, int] = field(default_factory=dict)
    file_of: array = field(default_factory=lambda: array("I"))
    number_of: array = field(default_factory=lambda: array("Q"))
    # Of each sample that is kept, its row.
    rows: array = field(default_factory=lambda: array("Q"))

    def add_place(self, place: str) -> None:
        """Remembers where a row is: 'FILE line 7'."""
        file, _, number = place.rpartition(" ")
        self.file_of.append(self.files.setdefault(file, len(self.files)))
        self.number_of.append(int(number))
        self.read += 1

    def place(self, number: int) -> str:
        """Returns where a sample that is kept was."""
        return self.place_of_row(self.rows[number])

    def place_of_row(self, row: int) -> str:
        """Returns where a row was that was read."""
        return f"{list(self.files)[self.file_of[row]]} {self.number_of[row]}"

    def left_out(self, seq_len: int) -> str:
        """Says what was left out, after a colon; empty if nothing was."""
        too_long = f"longer than seq_len + 1 = {seq_len + 1:,} tokens"
        parts = (
            f"{self.dropped:,} are {too_long}" if self.dropped else "",
            f"{self.truncated:,} are cut, {too_long}" if self.truncated else "",
            f"{self.untrained:,} have nothing to train on" if self.untrained else "",
        )
        there = ", ".join(part for part in parts if part)
        return f": {there}" if there else ""

    def divided(self, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the samples to train on and those that are held out, by their numbers.

        The draw is among all rows that were read, so that it does not depend on what was left out.
        """
        held_out = np.zeros(self.read, dtype=bool)
        words = random_words(self.read, seed, HELD_OUT)
        held_out[np.argsort(words, kind="stable")[: int(self.read * share)]] = True
        mask = held_out[np.array(self.rows, dtype=np.int64)]
        return np.flatnonzero(~mask), np.flatnonzero(mask)


@dataclass(frozen=True)
class Fitting:
    """Leaves out samples that have nothing to train on, and what of them is too long.

    Args:
        too_long: what becomes of a sample of more than `seq_len` + 1 tokens: drop, truncate or refuse.
    """

    seq_len: int
    too_long: str

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise UserError(f"dataset.too_long={self.too_long}: must be {', '.join(TOO_LONG[:-1])} or {TOO_LONG[-1]}")

    def samples(self, samples: Iterable[Sample], kept: KeptSamples) -> Iterator[Sample]:
        """Yields the samples that fit, in their order, and counts the others. Raises UserError for one to refuse."""
        most = self.seq_len + 1
        for row, sample in enumerate(samples):
            if len(sample.ids) > most:
                if self.too_long == "refuse":
                    raise UserError(
                        f"{kept.place_of_row(row)}: {len(sample.ids):,} tokens are more than seq_len + 1 = {most:,}:"
                        " give a larger seq_len, or dataset.too_long=drop or truncate"
                    )
                if self.too_long == "drop":
                    kept.dropped += 1
                    continue
            cut, sample = len(sample.ids) > most, Sample(sample.ids[:most], sample.trained[:most])
            # The first token is no label.
            if not sample.trained[1:].any():
                kept.untrained += 1
                continue
            kept.truncated += cut
            kept.rows.append(row)
            yield sample
