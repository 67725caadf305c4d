"""Batches of one tensor and of several."""

import pytest
import torch
from torch import Tensor, nn

from training.batches import (
    examples_in,
    nonfinite_in,
    refuse_padding,
    sha256_of,
    split_by,
    split_into,
    tokens_in,
    trained_tokens_in,
    uploaded,
)
from training.errors import UserError

TENSOR = torch.arange(10).view(5, 2)
BOTH = {"images": torch.arange(20.0).view(5, 2, 2), "labels": torch.arange(5)}


def test_parts_are_those_of_each_tensor():
    assert [part.tolist() for part in split_into(TENSOR, 2)] == [TENSOR[:3].tolist(), TENSOR[3:].tolist()]
    assert [examples_in(part) for part in split_into(BOTH, 3)] == [2, 2, 1]
    parts = split_by(BOTH, 2)
    assert [examples_in(part) for part in parts] == [2, 2, 1]
    for name, tensor in BOTH.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)


def test_tensors_of_a_batch_count_the_same_examples():
    with pytest.raises(ValueError, match="first dimension"):
        examples_in(BOTH | {"labels": torch.arange(4)})


def test_tokens_are_those_without_padding():
    rows = torch.tensor([[1, 2, 3, 0], [4, 0, 0, 0]])
    assert tokens_in(rows) == 6
    assert tokens_in({"input_ids": rows}) == 8
    assert tokens_in({"input_ids": rows, "lengths": torch.tensor([3, 1])}) == 4
    assert tokens_in({"input_ids": rows, "segments": torch.tensor([[0, 0, 1, -1], [0, -1, -1, -1]])}) == 4
    assert tokens_in({"input_ids": rows.expand(3, 2, 4), "lengths": torch.full((3, 2), 2)}) == 12
    with pytest.raises(ValueError, match="it has images, labels"):
        tokens_in(BOTH)


def test_tokens_that_are_trained_on_are_those_with_a_label():
    assert trained_tokens_in(torch.tensor([[-100, 2, 0], [-100, -100, 5]])) == 3


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_an_example_that_is_not_finite_is_found(value: float):
    assert nonfinite_in(BOTH) is None
    assert nonfinite_in(TENSOR) is None
    images = torch.zeros(4, 1, 2, 2, dtype=torch.bfloat16)
    images[2, 0, 1, 1] = value
    assert nonfinite_in({"labels": torch.arange(4), "images": images}) == ("images", 2)
    assert nonfinite_in({"weights": torch.tensor([0.0, value, value])}) == ("weights", 1)


class Padded(nn.Module):
    def refuse_padding(self, batch: dict[str, Tensor]) -> None:
        raise ValueError(f"{', '.join(batch)}: give a mask")


def test_what_a_model_refuses_is_an_error_of_the_user() -> None:
    refuse_padding(nn.Linear(1, 1), BOTH, "step 3")
    with pytest.raises(UserError, match="step 3: images, labels: give a mask"):
        refuse_padding(Padded(), BOTH, "step 3")


def test_a_batch_arrives_as_it_is():
    there = uploaded(BOTH, torch.device("cpu"))
    assert there.keys() == BOTH.keys()
    assert all(torch.equal(there[name], tensor) for name, tensor in BOTH.items())


def test_a_digest_is_that_of_the_values():
    assert sha256_of(TENSOR) == sha256_of(TENSOR.t().contiguous().t())
    assert sha256_of(TENSOR) != sha256_of(TENSOR + 1)
    assert sha256_of(BOTH) == sha256_of(dict(reversed(BOTH.items())))
    assert sha256_of(BOTH) != sha256_of({"pictures": BOTH["images"], "labels": BOTH["labels"]})
    assert sha256_of(TENSOR.bfloat16()) != sha256_of(TENSOR.bfloat16() + 1)
