"""A recompute starts from attributes, random numbers and buffers of its forward, and leaves what it found."""

import random

import numpy
import pytest
import torch
from torch import nn

from offload.torch_private.buffer_states import SMALL_BYTES
from offload.torch_private.recomputed_blocks import (
    BlockAttributes,
    BlockBuffers,
    RandomState,
    arrived,
    buffers_here,
    changed,
    leaving,
    look_again,
    restore,
)


def draw() -> tuple[float, float, float]:
    return random.random(), float(numpy.random.rand()), float(torch.rand(()))


def test_all_generators_repeat():
    state = RandomState.of(torch.device("cpu"))
    first = draw()
    assert draw() != first
    state.restore()
    assert draw() == first


def test_those_of_python_alone():
    state = RandomState.of_python()
    first = draw()
    state.restore()
    second = draw()
    assert first[:2] == second[:2]
    assert first[2] != second[2]


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


def test_the_factors_of_adapters_are_those_of_forward_and_then_those_of_now():
    """diffusers multiplies peft's by the `scale` of a call, and divides them behind it."""
    block = Counts()
    block.inner.scaling = {"default": 0.7}
    found = BlockAttributes(block)
    block.inner.scaling["default"] = 1.0
    with found.in_recompute():
        assert block.inner.scaling == {"default": 0.7}
    assert block.inner.scaling == {"default": 1.0}


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


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("mask", torch.zeros(SMALL_BYTES + 1, dtype=torch.bool))


@pytest.fixture
def block() -> nn.Sequential:
    return nn.Sequential(Counting(), nn.Identity())


def forward(block: nn.Sequential, by: float = 1.0) -> BlockBuffers:
    buffers = BlockBuffers(block)
    with buffers.in_forward():
        block[0].count += by
    return buffers


def test_a_recompute_finds_what_its_own_forward_found(block: nn.Sequential):
    held, mask = block[0].count, block[0].mask
    calls = [forward(block, by) for by in (1.0, 10.0)]
    for buffers, found in zip(calls, (0.0, 1.0), strict=True):
        for _ in range(2):
            with buffers.in_recompute():
                assert block[0].count.tolist() == [found] * 2
                assert block[0].mask is mask
                block[0].count += 5
            assert block[0].count is held
            assert held.tolist() == [11.0] * 2


def test_what_a_recompute_saves_is_what_the_forward_left(block: nn.Sequential):
    """So it is without a recompute: autograd saves the buffer itself, and `.data` changes it unseen."""
    buffers = BlockBuffers(block)
    with buffers.in_forward():
        block[0].count.data.add_(7)
    with buffers.in_recompute():
        saved = block[0].count
    assert saved.tolist() == [7.0] * 2


def test_an_exception_ends_either(block: nn.Sequential):
    def count_and_fail() -> None:
        block[0].count += 1
        raise KeyError

    held = block[0].count
    with pytest.raises(KeyError), BlockBuffers(block).in_forward():
        count_and_fail()
    buffers = forward(block)
    with pytest.raises(KeyError), buffers.in_recompute():
        count_and_fail()
    assert block[0].count is held
    assert held.tolist() == [2.0] * 2


def test_replaced_and_registered_buffers(block: nn.Sequential):
    block[0].register_buffer("none", None)
    buffers = BlockBuffers(block)
    with buffers.in_forward():
        block[0].count = block[0].count + 1
        block[0].none = torch.ones(1)
        block[1].register_buffer("new", torch.ones(1))
    left = dict(block.named_buffers())
    with buffers.in_recompute():
        assert block[0].count.tolist() == [0.0, 0.0]
        assert block[0].none is None
        assert not hasattr(block[1], "new")
    assert all(tensor is left[name] for name, tensor in block.named_buffers())
    assert dict(block.named_buffers()).keys() == left.keys()


def test_a_buffer_that_two_modules_share_is_one_in_the_recompute_as_well():
    block = nn.Sequential(Counting(), Counting())
    block[1].count = block[0].count
    buffers = forward(block)
    with buffers.in_recompute():
        assert block[0].count is block[1].count


def test_a_large_mask_is_copied_once_it_was_seen_to_change(block: nn.Sequential):
    def flip() -> BlockBuffers:
        buffers = BlockBuffers(block)
        with buffers.in_forward():
            block[0].mask.logical_not_()
        return buffers

    with pytest.raises(RuntimeError, match=r"^forward has changed 0\.mask of a Sequential, .*run the step again$"):
        flip()
    buffers = flip()
    with buffers.in_recompute():
        assert block[0].mask.all()
    assert not block[0].mask.any()


def test_a_block_that_waited_looks_again(block: nn.Sequential):
    buffers = BlockBuffers(block)
    with buffers.in_forward():
        # In the turn of another microbatch.
        block[0].count = torch.full((2,), 3.0)
        look_again()
        block[0].count += 1
    with buffers.in_recompute():
        assert block[0].count.tolist() == [3.0, 3.0]
    look_again()


def test_buffers_that_are_away_are_left_alone_until_they_arrive(block: nn.Sequential):
    part = block[0]
    place, home, slot = (part, "count"), part.count, torch.zeros(2)

    def window(by: float) -> list[float]:
        part.count = slot.clone()
        arrived([place])
        part.count += by
        seen = part.count.tolist()
        leaving([place])
        slot.copy_(part.count)
        part.count = home
        return seen

    leaving([place])
    assert place not in buffers_here(block)
    try:
        buffers = BlockBuffers(block)
        with buffers.in_forward():
            assert [window(1.0), window(1.0)] == [[1.0, 1.0], [2.0, 2.0]]
        forward_of_another = BlockBuffers(block)
        with forward_of_another.in_forward():
            window(10.0)
        with buffers.in_recompute():
            assert part.count is home
            assert [window(1.0), window(1.0)] == [[1.0, 1.0], [2.0, 2.0]]
        assert slot.tolist() == [12.0, 12.0]
        assert home.tolist() == [0.0, 0.0]
    finally:
        arrived([place])
    assert place in buffers_here(block)
