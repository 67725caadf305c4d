"""A recompute begins with the attributes and parameters of its forward, and leaves what it found."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from offload.torch_private.block_attributes import BlockAttributes, changed, restore


class Counts(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.calls = 0


def test_attributes_are_those_of_forward_and_then_those_of_now():
    block = Counts()
    found = BlockAttributes(block)
    block.calls, block.late = 5, "new"
    block.eval()

    def recompute() -> None:
        with found.in_recompute():
            assert block.calls == 0
            assert not hasattr(block, "late")
            assert block.training
            assert block.inner.training
            block.calls, block.made = 1, "in the recompute"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        recompute()
    assert (block.calls, block.late, block.training) == (5, "new", False)
    assert not hasattr(block, "made")


def test_parameters_are_those_that_the_forward_had():
    block = Counts()
    weight, value = block.inner.weight, torch.zeros(2, 2, requires_grad=True) * 2
    block.inner._parameters["weight"] = value
    found = BlockAttributes(block)
    block.inner._parameters["weight"] = weight
    with found.in_recompute():
        assert block.inner.weight is value
    assert block.inner.weight is weight


def test_random_numbers_repeat_and_go_on():
    random.seed(1)
    found = BlockAttributes(Counts())
    first, second = random.random(), random.random()
    random.seed(1)
    random.random()
    with found.in_recompute():
        assert [random.random(), random.random()] == [first, second]
    assert random.random() == second


def test_changes_are_named():
    same = object()
    attributes = {"same": same, "other": 1, "new": 2, "_flat_weights": []}
    found = {"same": same, "other": 3, "gone": 4, "_flat_weights": [0]}
    assert sorted(changed(attributes, found)) == ["gone", "new", "other"]
    assert changed(found, dict(found)) == []
    flat = attributes["_flat_weights"]
    restore(attributes, found)
    assert attributes == {**found, "_flat_weights": flat}
