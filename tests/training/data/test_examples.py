"""The order of numbered examples: epochs, the held-out part, and independence of earlier calls."""

import pytest
import torch

from training.data.examples import NumberedExamples
from training.errors import UserError


class Numbers(NumberedExamples):
    def examples(self, numbers, epochs):
        return {"numbers": torch.tensor(numbers), "epochs": torch.tensor(epochs)}


def seen(dataset: Numbers, batches: int) -> list[int]:
    return [number for index in range(batches) for number in dataset.batch(index)["numbers"].tolist()]


def test_each_epoch_has_each_example_once_in_its_own_order() -> None:
    dataset = Numbers(12, seed=0, batch_size=4)
    first, second = seen(dataset, 3), seen(dataset, 6)[12:]
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second


def test_a_batch_may_span_two_epochs() -> None:
    assert Numbers(3, seed=0, batch_size=2).batch(1)["epochs"].tolist() == [0, 1]


def test_batches_depend_on_seed_and_index_alone() -> None:
    dataset = Numbers(50, seed=3, batch_size=8)
    seventh = dataset.batch(7)["numbers"]
    dataset.batch(0)
    assert torch.equal(seventh, dataset.batch(7)["numbers"])
    assert torch.equal(seventh, Numbers(50, seed=3, batch_size=8).batch(7)["numbers"])
    assert not torch.equal(seventh, Numbers(50, seed=4, batch_size=8).batch(7)["numbers"])


def test_held_out_examples_are_in_no_batch() -> None:
    dataset = Numbers(20, seed=0, batch_size=4, eval_share=0.25)
    assert dataset.num_blocks == 15
    assert max(seen(dataset, 30)) == 14
    batches = dataset.eval_batches(100)
    assert [batch["numbers"].tolist() for batch in batches] == [[15, 16, 17, 18], [19]]
    assert batches[0]["epochs"].tolist() == [-1] * 4


def test_few_held_out_examples_are_spread_evenly() -> None:
    dataset = Numbers(1000, seed=0, batch_size=2, eval_share=0.5)
    assert [batch["numbers"].tolist() for batch in dataset.eval_batches(2)] == [[500, 625], [750, 875]]
    assert Numbers(10, seed=0, batch_size=2).eval_batches(3) == []


@pytest.mark.parametrize("share", [-0.1, 0.6, float("nan")])
def test_shares_out_of_range_are_refused(share: float) -> None:
    with pytest.raises(UserError, match=r"^dataset.eval_share=.*: must be at least 0 and at most 0.5"):
        Numbers(10, seed=0, batch_size=2, eval_share=share)


def test_no_examples_are_refused() -> None:
    with pytest.raises(UserError, match=r"^dataset: 0 examples"):
        Numbers(0, seed=0, batch_size=2)
