"""Records the examples that are kept: where each was, what was left out, and which of them are held out."""

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from training.data.chats.reading import Rows
from training.data.chats.rendering import Sample
from training.data.packing import random_words
from training.errors import UserError

TOO_LONG = ("drop", "truncate", "refuse")
# In the key of random words: which examples are held out.
HELD_OUT = 2


@dataclass
class Kept:
    """The rows that were read and are kept as examples, and how many are left out for which reason.

    `too_long` says what becomes of samples with more than `seq_len` + 1 tokens: drop, truncate or refuse. Raises
    UserError for another value.
    """

    seq_len: int
    too_long: str
    read: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    # Of each row that was read: its file, as an index of `files`, and what it is called there.
    files: dict[str, int] = field(default_factory=dict)
    file_of: array = field(default_factory=lambda: array("I"))
    number_of: array = field(default_factory=lambda: array("Q"))
    # Of each example that is kept, its row.
    rows: array = field(default_factory=lambda: array("Q"))

    def __post_init__(self) -> None:
        if self.too_long not in TOO_LONG:
            raise UserError(f"dataset.too_long={self.too_long}: must be {', '.join(TOO_LONG[:-1])} or {TOO_LONG[-1]}")

    def reading(self, rows: Rows) -> Rows:
        """Yields the rows, and remembers where each is: 'FILE line 7'."""
        for place, row in rows:
            file, _, number = place.rpartition(" ")
            self.file_of.append(self.files.setdefault(file, len(self.files)))
            self.number_of.append(int(number))
            self.read += 1
            yield place, row

    def fitting(self, examples: Iterable[tuple[Sample, ...]]) -> Iterator[tuple[Sample, ...]]:
        """Yields the examples that are kept, each of one sample or two, and counts the others by reason.

        Raises UserError for a long sample if too_long=refuse.
        """
        most = self.seq_len + 1
        for row, example in enumerate(examples):
            longest = max(len(sample.ids) for sample in example)
            if longest > most and self.too_long == "refuse":
                raise UserError(
                    f"{self._place_of(row)}: {longest:,} tokens are more than seq_len + 1 = {most:,}: give a larger"
                    " seq_len, or dataset.too_long=drop or truncate"
                )
            if longest > most and self.too_long == "drop":
                self.counts[f"are longer than seq_len + 1 = {most:,} tokens"] += 1
                continue
            cut = tuple(Sample(sample.ids[:most], sample.trained[:most]) for sample in example)
            # The first token is no label.
            if not all(sample.trained[1:].any() for sample in cut):
                self.counts["have nothing to train on"] += 1
            elif len(cut) == 2 and np.array_equal(cut[0].ids, cut[1].ids):
                self.counts["have equal answers"] += 1
            else:
                self.counts[f"are cut, longer than seq_len + 1 = {most:,} tokens"] += longest > most
                self.rows.append(row)
                yield cut

    def place(self, number: int) -> str:
        """Returns where an example that is kept was."""
        return self._place_of(self.rows[number])

    def left_out(self) -> str:
        """Says how many examples were left out or cut, and why; empty if none were."""
        return ", ".join(f"{count:,} {why}" for why, count in self.counts.items() if count)

    def divided(self, share: float, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the numbers of the kept examples to train on, and of those that are held out, each int64 [examples].

        The share is drawn among all rows that were read, so that it does not depend on which ones are kept.
        """
        held_out = np.zeros(self.read, dtype=bool)
        words = random_words(self.read, seed, HELD_OUT)
        held_out[np.argsort(words, kind="stable")[: int(self.read * share)]] = True
        mask = held_out[np.array(self.rows, dtype=np.int64)]
        return np.flatnonzero(~mask), np.flatnonzero(mask)

    def _place_of(self, row: int) -> str:
        return f"{list(self.files)[self.file_of[row]]} {self.number_of[row]}"
