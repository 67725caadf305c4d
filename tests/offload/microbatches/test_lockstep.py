"""Functions in lockstep: their turns, the state of their threads, and their errors."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from offload.microbatches.lockstep import Lockstep, Threads
from offload.optimizer.kernels import torch_threads
from offload.torch_private.module_contexts import running_microbatch


@pytest.fixture
def threads():
    made = Threads()
    yield made
    made.close()


def run(streams, *routes):
    """Runs a function for each route, a list of places. Returns the order in which they reached the places."""
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


def test_a_function_that_skips_a_place_waits_for_the_others_at_the_next(streams):
    assert run(streams, [0, 2], [0, 1, 2], [1, 2]) == [
        (0, 0), (0, 1), (1, 1), (1, 2), (2, 0), (2, 1), (2, 2),
    ]  # fmt: skip


def test_places_may_be_passed_several_times(streams):
    assert run(streams, [0, 1, 0, 1], [0, 1, 0, 1]) == [
        (place, index) for place in (0, 1, 0, 1) for index in (0, 1)
    ]  # fmt: skip


def test_every_function_has_the_callers_modes(streams, threads):
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


def test_the_caller_finds_the_random_state_that_the_last_function_left(streams, threads):
    def draw(seed, *places):
        torch.manual_seed(seed)
        for place in places:
            lockstep.pause(place)

    lockstep = Lockstep([lambda: draw(1, 0, 1), lambda: draw(2, 0)], streams, threads)
    lockstep.run()
    assert torch.initial_seed() == 2


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


def test_each_turn_runs_in_a_context_of_its_own_and_knows_its_number(streams, threads):
    events = []

    @contextmanager
    def around(index: int) -> Iterator[None]:
        events.append(f"open {index}")
        yield
        events.append(f"close {index}")

    def travel() -> None:
        events.append(running_microbatch())
        assert lockstep.pause(0)
        assert not lockstep.pause(0)
        events.append(running_microbatch())

    lockstep = Lockstep([travel, travel], streams, threads, around)
    lockstep.run()
    turns = [[f"open {index}", index, f"close {index}"] for index in (0, 1, 0, 1)]
    assert events == [event for turn in turns for event in turn]
    assert not lockstep.pause(1)


def test_functions_compute_on_the_callers_number_of_cores(streams):
    cores, fresh = torch.get_num_threads(), Threads()

    def begun_elsewhere() -> None:
        with torch_threads(cores + 1):
            others.wait()
            others.wait()

    others = threading.Barrier(2, timeout=300)
    other = threading.Thread(target=begun_elsewhere)
    other.start()
    others.wait()
    try:
        assert Lockstep([torch.get_num_threads] * 2, streams, fresh).run() == [cores] * 2
    finally:
        others.wait()
        other.join(300)
        fresh.close()


def test_functions_have_the_callers_default_device(streams, threads):
    with torch.device("meta"):
        found = Lockstep([lambda: torch.empty(1).device.type] * 2, streams, threads).run()
    assert found == ["meta", "meta"]
    assert Lockstep([lambda: torch.empty(1).device.type], streams, threads).run() == ["cpu"]
