"""Rows of samples: each sample once an epoch, alone and padded or packed, as a pure function of seed and index."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from training.data.chats.rendering import Sample
from training.data.chats.rows import BATCHES_OF_WINDOW, PackedRows, PaddedRows, SampleTokens, best_fit


def tokens_of(lengths: list[int]) -> SampleTokens:
    """Makes samples of so many tokens, whose ids count on from sample to sample; every third is not trained on."""
    ends = np.cumsum(lengths)
    samples = (
        Sample(np.arange(end - n, end, dtype=np.uint32), np.arange(n) % 3 > 0)
        for n, end in zip(lengths, ends, strict=True)
    )
    return SampleTokens.of(samples, vocab_size=int(ends[-1]))


def lengths_of(count: int, largest: int = 40) -> list[int]:
    return np.random.default_rng(0).integers(2, largest, count).tolist()


def rows_of(kind: str, lengths: list[int], batch_size: int, seq_len: int = 50, seed: int = 3):
    tokens, numbers = tokens_of(lengths), np.arange(len(lengths))
    if kind == "packed":
        return PackedRows(tokens, numbers, seed=seed, batch_size=batch_size, seq_len=seq_len)
    return PaddedRows(tokens, numbers, seed=seed, batch_size=batch_size)


def test_samples_come_back_as_they_were() -> None:
    tokens = tokens_of([3, 2, 5])

    assert len(tokens) == 3
    assert tokens.positions.tolist() == [2, 1, 4]
    assert tokens.ids.dtype == np.uint16
    (last,) = tokens.samples(2)
    assert last.ids.tolist() == [5, 6, 7, 8, 9]
    assert last.trained.tolist() == [False, True, True, False, True]
    assert SampleTokens.of([Sample(np.array([70_000]), np.array([True]))], 70_001).ids.dtype == np.uint32


def test_a_padded_row() -> None:
    rows = PaddedRows(tokens_of([3, 5]), np.arange(2), seed=0, batch_size=2)

    batch = rows.made([0, 1])

    assert batch["input_ids"].tolist() == [[0, 1, 0, 0], [3, 4, 5, 6]]
    assert batch["labels"].tolist() == [[1, 2, -100, -100], [4, 5, -100, 7]]
    assert batch["lengths"].tolist() == [2, 4]
    assert {tensor.dtype for tensor in batch.values()} == {torch.int64}


def test_a_packed_row() -> None:
    rows = PackedRows(tokens_of([3, 4]), np.arange(2), seed=0, batch_size=1, seq_len=6)

    batch = rows.batch(0)

    assert batch["input_ids"].tolist() == [[3, 4, 5, 0, 1, 0]]
    assert batch["labels"].tolist() == [[4, 5, -100, 1, 2, -100]]
    assert batch["segments"].tolist() == [[0, 0, 0, 1, 1, -1]]
    assert rows.members(0) == [1, 0]
    assert rows.filled == 5 / 6


@pytest.mark.parametrize("kind", ["padded", "packed"])
@pytest.mark.parametrize(("count", "batch_size"), [(1, 4), (7, 3), (64, 8), (1003, 8)])
def test_every_epoch_has_every_sample_once(kind: str, count: int, batch_size: int) -> None:
    rows = rows_of(kind, lengths_of(count), batch_size)
    stream = [row for index in range(-(-3 * rows.num_blocks // batch_size)) for row in rows.rows_of(index)]

    orders = []
    for epoch in range(3):
        part = stream[epoch * rows.num_blocks : (epoch + 1) * rows.num_blocks]
        assert sorted(part) == list(range(rows.num_blocks))
        assert sorted(number for row in part for number in rows.members(row)) == list(range(count))
        orders.append(part)
    assert count < 7 or orders[0] != orders[1]


@pytest.mark.parametrize("kind", ["padded", "packed"])
def test_batches_are_a_function_of_seed_and_index(kind: str) -> None:
    lengths = lengths_of(100)
    rows = rows_of(kind, lengths, 8)
    later = rows.batch(20)

    again = rows_of(kind, lengths, 8)
    assert all(torch.equal(later[name], again.batch(20)[name]) for name in later)
    assert not torch.equal(rows_of(kind, lengths, 8, seed=4).batch(0)["input_ids"], again.batch(0)["input_ids"])


def test_padded_batches_have_samples_of_like_length_in_mixed_order() -> None:
    rows = rows_of("padded", lengths_of(2000, 200), 8)

    longest = [rows.batch(index)["input_ids"].shape[1] for index in range(BATCHES_OF_WINDOW)]

    assert rows.filled > 0.95
    # Short and long batches alternate: no part of an epoch has the short ones alone.
    assert longest != sorted(longest)
    assert np.ptp(longest[: BATCHES_OF_WINDOW // 4]) > 100


def test_samples_of_a_batch_change_from_epoch_to_epoch() -> None:
    rows = rows_of("padded", lengths_of(400), 8)

    first, second = ({frozenset(part) for part in rows.order(epoch).reshape(-1, 8).tolist()} for epoch in (0, 1))

    assert not first & second


def test_held_out_batches_have_each_row_once_at_most() -> None:
    for kind in ("padded", "packed"):
        rows = rows_of(kind, lengths_of(100), 8)
        everything = rows.some_batches(1000)
        few = rows.some_batches(2)

        assert sum(len(batch["input_ids"]) for batch in everything) == rows.num_blocks
        assert [len(batch["input_ids"]) for batch in few] == [8, 8]
        assert all(
            torch.equal(one["labels"], other["labels"]) for one, other in zip(few, rows.some_batches(2), strict=True)
        )


@pytest.mark.parametrize("capacity", [1, 7, 40, 64])
def test_best_fit_places_each_item_once_within_the_capacity(capacity: int) -> None:
    sizes = np.minimum(np.array(lengths_of(500)), capacity)

    items, starts = best_fit(sizes, capacity)

    assert sorted(items.tolist()) == list(range(500))
    filled = np.add.reduceat(sizes[items], starts[:-1])
    assert filled.max() <= capacity
    assert starts[0] == 0
    assert starts[-1] == 500
    # Best fit decreasing needs at most 11/9 of the fewest rows, and one.
    assert len(filled) <= 11 / 9 * -(-sizes.sum() // capacity) + 1


def test_best_fit_takes_the_row_with_least_room() -> None:
    items, starts = best_fit(np.array([6, 7, 3, 4]), 10)

    assert [items[start:end].tolist() for start, end in pairwise(starts)] == [[1, 2], [0, 3]]
