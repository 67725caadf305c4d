from itertools import combinations, pairwise

import pytest

from offload.modes.shard_offload import cut_evenly, shards_needed


@pytest.mark.parametrize(
    ("sizes", "count", "lengths"),
    [
        ([100, 1, 1, 1], 3, [1, 1, 2]),
        ([1, 1, 1, 100], 3, [1, 2, 1]),
        ([1] * 10, 3, [3, 3, 4]),
        ([1] * 4, 4, [1, 1, 1, 1]),
        ([5, 5, 1, 1, 8], 2, [2, 3]),
        ([0, 0, 0], 2, [1, 2]),
        ([7], 1, [1]),
    ],
)
def test_shards_are_contiguous_balanced_and_never_empty(sizes, count, lengths):
    runs = cut_evenly(sizes, count)
    assert [len(run) for run in runs] == lengths
    assert [index for run in runs for index in run] == list(range(len(sizes)))


def test_no_other_cut_is_better_balanced():
    sizes = [3, 9, 2, 2, 7, 1, 8, 4]
    for count in range(1, len(sizes) + 1):
        cuts = ((0, *inner, len(sizes)) for inner in combinations(range(1, len(sizes)), count - 1))
        best = min(sum(sum(sizes[a:b]) ** 2 for a, b in pairwise(cut)) for cut in cuts)
        assert sum(sum(sizes[index] for index in run) ** 2 for run in cut_evenly(sizes, count)) == best


def test_a_limit_is_kept_but_for_a_block_that_is_larger():
    sizes = [3, 3, 3, 9, 1]
    count = shards_needed(sizes, 6)
    assert count == 4
    assert [sum(sizes[index] for index in run) for run in cut_evenly(sizes, count, 6)] in ([3, 6, 9, 1], [6, 3, 9, 1])


def test_more_shards_than_blocks_are_refused():
    with pytest.raises(ValueError, match="2 blocks cannot be cut into 3"):
        cut_evenly([1, 1], 3)
