"""Rows of samples: one sample a row, padded, or as many as fit in a row, packed.

A sample of n tokens takes n - 1 positions: inputs are all but its last token, labels all but its first, where these are
trained on. Every batch is a pure function of samples, seed and index.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import Self

import numpy as np
import torch
from torch import Tensor

from training.batches import IGNORED_LABEL
from training.data.chats.rendering import Sample
from training.data.packing import epoch_order, places_of_batch, random_words, token_dtype

# The samples of so many batches are sorted by length. More would save padding, and fewer leave more to chance: which
# samples are in a batch together.
BATCHES_OF_WINDOW = 50
# So many samples of a batch are named in a message.
NAMED = 8
# In the key of random words, beside the epoch: the order of batches within a window.
ORDER_OF_BATCHES = 1


@dataclass(frozen=True)
class SampleTokens:
    """The tokens of many examples, each of `group` samples, one sample after the other.

    `ids` are uint16 or uint32 [tokens]; `trained`, bool [tokens], is True where a token is trained on. `starts`, int64
    [samples + 1], has the place where each sample starts, and at its end the number of tokens.
    """

    ids: np.ndarray
    trained: np.ndarray
    starts: np.ndarray
    group: int = 1

    @classmethod
    def of(cls, samples: Iterable[Sample], vocab_size: int, group: int = 1) -> Self:
        """Joins samples, whose ids are below `vocab_size`."""
        # Bytearrays grow in place: a list of arrays would need as much again.
        dtype, ids, trained, ends = token_dtype(vocab_size), bytearray(), bytearray(), [0]
        for sample in samples:
            ids += sample.ids.astype(dtype).data
            trained += sample.trained.astype(bool).data
            ends.append(len(trained))
        return cls(np.frombuffer(ids, dtype), np.frombuffer(trained, bool), np.array(ends, dtype=np.int64), group)

    def __len__(self) -> int:
        return (len(self.starts) - 1) // self.group

    @property
    def positions(self) -> np.ndarray:
        """The positions that each example takes in a row, those of its longest sample: int64 [examples]."""
        return np.diff(self.starts).reshape(-1, self.group).max(axis=1) - 1

    @property
    def counts(self) -> np.ndarray:
        """The tokens of each example: int64 [examples]."""
        return np.diff(self.starts[:: self.group])

    @property
    def trained_counts(self) -> np.ndarray:
        """Those that are trained on: int64 [examples]."""
        return np.add.reduceat(self.trained, self.starts[: -1 : self.group], dtype=np.int64)

    def samples(self, number: int) -> list[Sample]:
        """Returns the samples of an example."""
        edges = self.starts[number * self.group : (number + 1) * self.group + 1].tolist()
        return [Sample(self.ids[start:end], self.trained[start:end]) for start, end in pairwise(edges)]


class Rows(ABC):
    """Batches of rows that hold examples. An epoch has all `num_blocks` rows, in a new order."""

    num_blocks: int

    def __init__(self, tokens: SampleTokens, seed: int, batch_size: int):
        self._tokens, self._seed, self._batch_size = tokens, seed, batch_size

    @property
    @abstractmethod
    def filled(self) -> float:
        """The share of positions that are no padding, in the first epoch."""

    @abstractmethod
    def members(self, row: int) -> Sequence[int]:
        """Returns the examples in a row, by their numbers."""

    @abstractmethod
    def made(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns a batch of these rows, on the CPU."""

    def order(self, epoch: int) -> np.ndarray:
        """Returns the order of rows in an epoch: a permutation, int64 [num_blocks]."""
        return epoch_order(self.num_blocks, self._seed, epoch)

    def spread(self, wanted: int) -> list[int]:
        """Returns so many rows, spread evenly over all of them."""
        return [place * self.num_blocks // wanted for place in range(wanted)]

    def rows_of(self, index: int) -> list[int]:
        """Returns the rows of batch `index` >= 0; a batch may have the end of one epoch and the start of the next."""
        places = places_of_batch(index, self._batch_size, self.num_blocks)
        return [int(self.order(epoch)[position]) for epoch, position in places]

    def names(self, index: int, place: Callable[[int], str]) -> str:
        """Names the examples of batch `index`, by the `place` of each; of many the first, and how many more."""
        numbers = [number for row in self.rows_of(index) for number in self.members(row)]
        more = f" and {len(numbers) - NAMED:,} more" if len(numbers) > NAMED else ""
        return ", ".join(place(number) for number in numbers[:NAMED]) + more

    def batch(self, index: int) -> dict[str, Tensor]:
        """Returns batch `index` >= 0 on the CPU."""
        return self.made(self.rows_of(index))

    def some_batches(self, count: int) -> list[dict[str, Tensor]]:
        """Returns up to `count` batches, the same at each call: each row is there once at most."""
        rows = self.spread(min(count * self._batch_size, self.num_blocks))
        return [self.made(rows[start : start + self._batch_size]) for start in range(0, len(rows), self._batch_size)]


class PaddedRows(Rows):
    """Rows of one example each, padded to the longest of the batch; a batch has examples of about the same length."""

    def __init__(self, tokens: SampleTokens, numbers: np.ndarray, *, seed: int, batch_size: int):
        super().__init__(tokens, seed, batch_size)
        self._numbers = numbers
        self._lengths = tokens.positions[numbers]
        self.num_blocks = len(numbers)
        # An attribute, so that it goes with these rows.
        self._remembered = lru_cache(maxsize=2)(self._order)

    @property
    def filled(self) -> float:
        lengths = self._lengths[self.order(0)]
        starts = np.arange(0, len(lengths), self._batch_size)
        in_batches = np.diff(np.append(starts, len(lengths)))
        padded = (np.maximum.reduceat(lengths, starts) * in_batches).sum() * self._tokens.group
        return float((self._tokens.counts[self._numbers] - self._tokens.group).sum() / padded)

    def members(self, row: int) -> Sequence[int]:
        return (int(self._numbers[row]),)

    def made(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns `input_ids` and `labels` int64 [samples, longest], and `lengths` int64 [samples]."""
        samples = [sample for number in self._numbers[list(rows)] for sample in self._tokens.samples(number)]
        lengths = np.array([len(sample.ids) - 1 for sample in samples], dtype=np.int64)
        inputs, labels = _empty(len(samples), int(lengths.max()))
        for row, sample in enumerate(samples):
            _fill(inputs[row], labels[row], sample)
        return {**_tensors(inputs, labels), "lengths": torch.from_numpy(lengths)}

    def order(self, epoch: int) -> np.ndarray:
        return self._remembered(epoch)

    def spread(self, wanted: int) -> list[int]:
        return sorted(super().spread(wanted), key=lambda row: (self._lengths[row], row))

    def _order(self, epoch: int) -> np.ndarray:
        """Returns the order of an epoch: shuffled, then sorted by length within windows of some whole batches.

        Then the batches of each window are shuffled.
        """
        order = super().order(epoch)
        size = self._batch_size
        first = min(-epoch * self.num_blocks % size, self.num_blocks)
        last = first + (self.num_blocks - first) // size * size
        parts = [order[:first]]
        for window, start in enumerate(range(first, last, size * BATCHES_OF_WINDOW)):
            part = order[start : min(start + size * BATCHES_OF_WINDOW, last)]
            batches = part[np.argsort(self._lengths[part], kind="stable")].reshape(-1, size)
            words = random_words(len(batches), self._seed, epoch, ORDER_OF_BATCHES, window)
            parts.append(batches[np.argsort(words, kind="stable")].reshape(-1))
        return np.concatenate([*parts, order[last:]])


class PairRows(PaddedRows):
    """Rows of one pair each."""

    def made(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns `input_ids` and `labels` int64 [pairs, 2, longest], `lengths` [pairs, 2] and `index` [pairs]."""
        batch = {name: tensor.unflatten(0, (-1, 2)) for name, tensor in super().made(rows).items()}
        return batch | {"index": torch.from_numpy(self._numbers[list(rows)])}


class PackedRows(Rows):
    """Rows of `seq_len` positions, each with several whole samples of `numbers`, packed once for all epochs."""

    def __init__(self, tokens: SampleTokens, numbers: np.ndarray, *, seed: int, batch_size: int, seq_len: int):
        super().__init__(tokens, seed, batch_size)
        self._seq_len = seq_len
        self._positions = int(tokens.positions[numbers].sum())
        order, self._starts = best_fit(tokens.positions[numbers], seq_len)
        self._members = numbers[order]
        self.num_blocks = len(self._starts) - 1

    @property
    def filled(self) -> float:
        return self._positions / (self.num_blocks * self._seq_len)

    def members(self, row: int) -> Sequence[int]:
        return self._members[self._starts[row] : self._starts[row + 1]].tolist()

    def made(self, rows: Sequence[int]) -> dict[str, Tensor]:
        """Returns `input_ids`, `labels` and `segments`, int64 [rows, seq_len]."""
        inputs, labels = _empty(len(rows), self._seq_len)
        segments = np.full_like(inputs, -1)
        for row, packed in enumerate(rows):
            start = 0
            for segment, number in enumerate(self.members(packed)):
                (sample,) = self._tokens.samples(number)
                end = start + len(sample.ids) - 1
                _fill(inputs[row, start:end], labels[row, start:end], sample)
                segments[row, start:end] = segment
                start = end
        return {**_tensors(inputs, labels), "segments": torch.from_numpy(segments)}


def best_fit(sizes: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """Packs items into rows of `capacity`: the largest item first, each into the fullest row that has room for it.

    This is best fit decreasing (Johnson 1973). Bit k of an integer says whether a row has room k left, so that a
    million items take seconds. `sizes`, int64 [items], are from 1 to `capacity`. Returns the indices of the items, row
    after row, int64 [items], and the places where rows begin and the last row ends, int64 [rows + 1].
    """
    largest_first = np.argsort(-sizes, kind="stable")
    rows_with_room: list[list[int]] = [[] for _ in range(capacity + 1)]
    row_of = np.empty(len(sizes), dtype=np.int64)
    rooms = rows = 0
    for place, size in enumerate(sizes[largest_first].tolist()):
        if enough := rooms >> size:
            room = size + (enough & -enough).bit_length() - 1
            row = rows_with_room[room].pop()
            if not rows_with_room[room]:
                rooms ^= 1 << room
        else:
            row, room, rows = rows, capacity, rows + 1
        row_of[place] = row
        if left := room - size:
            rows_with_room[left].append(row)
            rooms |= 1 << left
    items = largest_first[np.argsort(row_of, kind="stable")]
    return items, np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=rows))]).astype(np.int64)


def meta_batch(**shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Returns a batch of int64 tensors of these shapes, by name, on the meta device."""
    return {name: torch.empty(shape, dtype=torch.int64, device="meta") for name, shape in shapes.items()}


def _empty(rows: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Makes inputs and labels of padding. Any token may be the input there: nothing before it sees it."""
    return np.zeros((rows, length), dtype=np.int64), np.full((rows, length), IGNORED_LABEL, dtype=np.int64)


def _fill(inputs: np.ndarray, labels: np.ndarray, sample: Sample) -> None:
    """Writes a sample to the beginning of a row."""
    count = len(sample.ids) - 1
    inputs[:count] = sample.ids[:-1]
    labels[:count] = np.where(sample.trained[1:], sample.ids[1:].astype(np.int64), IGNORED_LABEL)


def _tensors(inputs: np.ndarray, labels: np.ndarray) -> dict[str, Tensor]:
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}
