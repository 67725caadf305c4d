"""Batches of one bucket: counts, order, and repeats."""

from collections import Counter
from pathlib import Path

import pytest

from training.data.captioned.buckets import BucketBatches
from training.data.captioned.pictures import CaptionedPicture


def pictures_of(*counts: tuple[tuple[int, int], int, int]) -> list[CaptionedPicture]:
    """Returns pictures: for each (size, repeats, count)."""
    return [
        CaptionedPicture(Path(f"{size}/{number}.png"), "", repeats, size, size, None)
        for size, repeats, count in counts
        for number in range(count)
    ]


PICTURES = pictures_of(((64, 64), 1, 7), ((32, 128), 3, 2), ((64, 64), 2, 3), ((128, 32), 1, 1))


def epoch_of(batches: BucketBatches, epoch: int) -> list[list[int]]:
    steps = batches.steps_per_epoch
    return [batches.of_step(step) for step in range(epoch * steps, (epoch + 1) * steps)]


@pytest.mark.parametrize("batch_size", [1, 2, 4, 5])
def test_a_batch_has_one_size_and_an_epoch_each_picture(batch_size: int) -> None:
    batches = BucketBatches(PICTURES, batch_size, seed=0)
    # 13 squares, 6 wide ones, 1 tall one.
    assert batches.steps_per_epoch == sum(-(-count // batch_size) for count in (13, 6, 1))
    for epoch in range(3):
        shown = epoch_of(batches, epoch)
        assert all(len(batch) == batch_size for batch in shown)
        assert all(len({PICTURES[number].size for number in batch}) == 1 for batch in shown)
        times = Counter(number for batch in shown for number in batch)
        assert all(times[number] >= picture.repeats for number, picture in enumerate(PICTURES))
        assert times.total() == batch_size * batches.steps_per_epoch
        if batch_size == 1:
            assert times == {number: picture.repeats for number, picture in enumerate(PICTURES)}


def test_a_batch_that_is_not_full_is_filled_with_pictures_of_its_bucket() -> None:
    pictures = pictures_of(((64, 64), 1, 5))
    for epoch in range(8):
        first, second = epoch_of(BucketBatches(pictures, 4, seed=1), epoch)
        (rest,) = set(range(5)).difference(max(first, second, key=lambda batch: len(set(batch))))
        assert {*first, *second} == set(range(5))
        assert sorted(Counter(first + second).values()) == [1, 1, 2, 2, 2]
        assert len(set(first)) == len(set(second)) == 4
        assert rest in first + second


def test_a_bucket_with_less_than_a_batch_repeats_its_pictures_evenly() -> None:
    (batch,) = epoch_of(BucketBatches(pictures_of(((64, 64), 1, 3)), 8, seed=0), 0)
    assert sorted(Counter(batch).values()) == [2, 3, 3]


def test_batches_depend_on_seed_and_step_alone() -> None:
    batches, again = (BucketBatches(PICTURES, 2, seed=5) for _ in range(2))
    expected = [batches.of_step(step) for step in range(40)]
    for step in (39, 3, 17, 0, 39, 12):
        assert again.of_step(step) == expected[step]
    assert [BucketBatches(PICTURES, 2, seed=6).of_step(step) for step in range(40)] != expected


def test_epochs_differ_in_the_order_of_pictures_and_of_buckets() -> None:
    batches = BucketBatches(PICTURES, 2, seed=0)
    epochs = [epoch_of(batches, epoch) for epoch in range(4)]
    assert len({str(epoch) for epoch in epochs}) == 4
    assert len({str([PICTURES[batch[0]].size for batch in epoch]) for epoch in epochs}) > 1
    assert len({str(sorted(map(sorted, epoch))) for epoch in epochs}) > 1


def test_a_bucket_is_shown_in_the_same_order_whatever_the_other_buckets() -> None:
    pictures = pictures_of(((64, 64), 1, 7))
    alone = epoch_of(BucketBatches(pictures, 2, seed=0), 0)
    joined = epoch_of(BucketBatches(pictures + pictures_of(((32, 128), 1, 3)), 2, seed=0), 0)
    assert sorted(alone) == sorted(batch for batch in joined if max(batch) < 7)
