"""Turns, thread-local modes and errors of functions that run in lockstep, and the order of backward."""

from __future__ import annotations

import threading

import pytest
import torch

from offload.microbatches.layer_major import LayerMajor
from offload.microbatches.lockstep import Lockstep, Threads


@pytest.fixture
def threads():
    made = Threads()
    yield made
    made.close()


def run(streams, *routes):
    """Sends one function along each route, a list of places, and returns the order in which they got there."""
    order = []

    def travel(index, route):
        for place in route:
            lockstep.pause(place)
            order.append((place, index))
        return index

    threads = Threads()
    lockstep = Lockstep([lambda i=i, r=r: travel(i, r) for i, r in enumerate(routes)], streams, threads)
    assert lockstep.run() == list(range(len(routes)))
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep")]
    return order


def test_all_pass_a_place_before_any_goes_on(streams):
    assert run(streams, [0, 1, 2], [0, 1, 2]) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0), (2, 1)]


def test_whoever_skips_a_place_waits_for_the_others_at_the_next(streams):
    assert run(streams, [0, 2], [0, 1, 2], [1, 2]) == [
        (0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


def test_places_may_be_passed_several_times(streams):
    assert run(streams, [0, 1, 0, 1], [0, 1, 0, 1]) == [
        (place, index) for place in (0, 1, 0, 1) for index in (0, 1)
    ]  # fmt: skip


def test_the_caller_s_modes_hold_in_every_function(streams, threads):
    def modes():
        lockstep.pause(0)
        return torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")

    with torch.no_grad(), torch.autocast("cpu", dtype=torch.float16):
        lockstep = Lockstep([modes, modes], streams, threads)
        assert lockstep.run() == [(False, True, torch.float16)] * 2
    lockstep = Lockstep([modes], streams, threads)
    assert lockstep.run()[0][:2] == (True, False)


def test_each_function_draws_its_own_random_numbers(streams, threads):
    def draw(seed):
        torch.manual_seed(seed)
        numbers = [torch.rand(2)]
        for place in range(3):
            lockstep.pause(place)
            numbers.append(torch.rand(2))
        return torch.stack(numbers)

    lockstep = Lockstep([lambda: draw(1), lambda: draw(2)], streams, threads)
    for seed, numbers in enumerate(lockstep.run(), start=1):
        torch.manual_seed(seed)
        assert torch.equal(numbers, torch.stack([torch.rand(2) for _ in range(4)]))


def test_threads_are_used_again(streams, threads):
    def name():
        lockstep.pause(0)
        return threading.get_ident()

    seen = []
    for _ in range(3):
        lockstep = Lockstep([name] * 3, streams, threads)
        seen.append(lockstep.run())
    assert seen[0] == seen[1] == seen[2]
    assert len(set(seen[0])) == 3


def test_an_error_ends_all_functions_in_order_and_reaches_the_caller(streams, threads):
    closed = []

    def travel(fails):
        try:
            lockstep.pause(0)
            if fails:
                raise KeyError("here")
            lockstep.pause(1)
        finally:
            closed.append(fails)

    lockstep = Lockstep([lambda: travel(False), lambda: travel(True), lambda: travel(False)], streams, threads)
    with pytest.raises(KeyError, match="here"):
        lockstep.run()
    assert sorted(closed) == [False, False, True]
    threads.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("lockstep")]


class Notes(torch.autograd.Function):
    """The identity; notes its name when backward passes."""

    @staticmethod
    def forward(ctx, x, name, seen):
        ctx.name, ctx.seen = name, seen
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.seen.append(ctx.name)
        return gradient, None, None


@pytest.fixture
def layer_major(streams):
    made = LayerMajor(streams)
    yield made
    made.close()


@pytest.mark.parametrize("count", [1, 2, 5])
def test_backward_takes_the_places_in_reverse_and_the_microbatches_in_order(layer_major, count):
    seen = []

    def loss(index):
        x = torch.ones(3, requires_grad=True) * (index + 1)
        for place in range(3):
            layer_major.enter(place)
            for layer in range(2):
                x = Notes.apply(torch.sin(x), (place, layer, index), seen)
        return x.sum()

    losses = layer_major.accumulate([lambda index=index: loss(index) for index in range(count)])
    assert len(losses) == count
    assert not any(value.requires_grad for value in losses)
    assert seen == [(place, layer, index) for place in (2, 1, 0) for index in range(count) for layer in (1, 0)]


def test_gradients_are_added_in_the_order_of_the_microbatches(layer_major):
    # 1e8 swallows a 1 that is added to it alone: another order of the same four numbers has another sum.
    factors = torch.tensor([1e8, 1.0, -1e8, 1.0])
    weight = torch.ones(1, requires_grad=True)

    def loss(index):
        layer_major.enter(0)
        return (weight * factors[index]).sum()

    layer_major.accumulate([lambda index=index: loss(index) for index in range(4)])
    expected = torch.zeros(1)
    for factor in factors:
        expected += factor
    assert torch.equal(weight.grad, expected)


def test_what_trains_upstream_gets_the_gradients_of_all(layer_major):
    upstream = torch.ones(2, requires_grad=True)
    hidden = upstream * 3

    def loss(index):
        layer_major.enter(0)
        return (hidden * (index + 1)).sum()

    layer_major.accumulate([lambda index=index: loss(index) for index in range(3)])
    assert torch.equal(upstream.grad, torch.full((2,), 18.0))
