"""Samples are kept, counted as left out, or held out."""

import numpy as np
import pytest

from training.data.chats.kept import Kept
from training.data.chats.rendering import Sample
from training.errors import UserError


def sample(tokens: int, trained_from: int = 1) -> Sample:
    return Sample(np.arange(tokens, dtype=np.uint32), np.arange(tokens) >= trained_from)


def kept_of(samples: list[Sample], too_long: str, seq_len: int = 4) -> tuple[Kept, list[Sample]]:
    kept = Kept(seq_len, too_long)
    rows = kept.reading((f"my chats.jsonl line {2 * number + 1}", {}) for number in range(len(samples)))
    examples = ((one,) for one, _ in zip(samples, rows, strict=True))
    return kept, [one for (one,) in kept.fitting(examples)]


SAMPLES = [sample(5), sample(6), sample(6, trained_from=5), sample(3, trained_from=3), sample(1, 0), sample(2)]


def test_long_samples_are_dropped() -> None:
    kept, samples = kept_of(SAMPLES, "drop")

    assert [len(one.ids) for one in samples] == [5, 2]
    assert [kept.place(number) for number in range(2)] == ["my chats.jsonl line 1", "my chats.jsonl line 11"]
    assert kept.left_out() == "2 are longer than seq_len + 1 = 5 tokens, 2 have nothing to train on"
    assert kept_of([sample(2)], "drop")[0].left_out() == ""


def test_long_samples_are_cut() -> None:
    kept, samples = kept_of(SAMPLES, "truncate")

    assert [one.ids.tolist() for one in samples] == [[0, 1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1]]
    assert kept.left_out() == "1 are cut, longer than seq_len + 1 = 5 tokens, 3 have nothing to train on"


def test_long_samples_are_refused() -> None:
    with pytest.raises(UserError, match=r"^my chats.jsonl line 3: 6 tokens are more than seq_len \+ 1 = 5: give"):
        kept_of(SAMPLES, "refuse")

    assert len(kept_of(SAMPLES, "refuse", seq_len=5)[1]) == 4


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(UserError, match=r"dataset.too_long=cut: must be drop, truncate or refuse"):
        Kept(4, "cut")


def test_the_held_out_split_depends_on_numbers_and_seed_and_not_on_what_is_dropped() -> None:
    lengths = [3 if number % 5 else 9 for number in range(100)]
    short, _ = kept_of([sample(n) for n in lengths], "drop", seq_len=4)
    everything, _ = kept_of([sample(n) for n in lengths], "drop", seq_len=10)

    training, held_out = everything.divided(0.2, seed=1)
    assert len(held_out) == 20
    assert sorted([*training, *held_out]) == list(range(100))
    assert held_out.max() - held_out.min() > 60, "not the file's tail"
    rows = {short.rows[number] for number in short.divided(0.2, seed=1)[1]}
    assert rows == {number for number in held_out.tolist() if lengths[number] == 3}
    assert everything.divided(0.2, seed=2)[1].tolist() != held_out.tolist()
    assert len(everything.divided(0.0, seed=1)[1]) == 0
