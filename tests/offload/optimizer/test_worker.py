"""The thread that updates units: at any pace, in its order, its errors, and its end; then it refers to nothing."""

import copy
import functools
import gc
import random
import subprocess
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.optimizer.adamw import HostAdamW
from offload.streams import registry
from offload.streams.stream_checker import CheckedEvent
from tests import ROOT
from tests.offload.helpers.census import assert_given_back
from tests.offload.helpers.models import Stack, assert_same, stack_inputs, under, with_copy
from tests.offload.helpers.updates import (
    EARLY,
    MODES,
    WORKER,
    eager,
    held_up,
    made,
    no_worker_lives,
    one_step,
    sleepy,
    states_of,
    train,
    updating,
)

pytestmark = pytest.mark.usefixtures("small")


def irregular(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes some updates at once, some late."""
    apply, pauses = HostAdamW.apply, random.Random(0)

    def irregular_apply(self, claims, scale=1.0):
        if threading.current_thread().name == WORKER:
            time.sleep(pauses.choice([0, 0, 0.001, 0.004]))
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", irregular_apply)


@EARLY
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pace", [sleepy, eager, irregular])
@pytest.mark.slow
def test_the_pace_of_the_worker_changes_no_number(pace: Callable, mode: str, early: bool, monkeypatch):
    """Updates that begin at the step are clipped."""
    pace(monkeypatch)
    ours, theirs = with_copy(made(Stack))
    options = {"steps": 6, "microbatches": 2, "clip_norm": None if early else 0.05}
    assert_same(train(ours, MODES[mode](), early, **options), train(theirs, Resident(), **options))


@EARLY
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("reader", ["evaluation", "optimizer", "model", "loading", "detach"])
@pytest.mark.sampled
def test_readers_see_finished_weights(reader: str, mode: str, early: bool, monkeypatch: pytest.MonkeyPatch):
    threads = sleepy(monkeypatch, 0.003)
    ours, theirs = with_copy(made(Stack))
    start = copy.deepcopy(ours.state_dict())

    def read(model: nn.Module, _, optimizer: HostAdamW) -> list[torch.Tensor]:
        if reader == "evaluation":
            with torch.no_grad():
                return [model(stack_inputs(9, 9))]
        if reader == "optimizer":
            return states_of(optimizer)
        if reader == "loading":
            model.load_state_dict(start)
        return [tensor.clone() for tensor in model.state_dict().values()] if reader == "model" else []

    def run(model: nn.Module, mode) -> list[torch.Tensor]:
        return train(model, mode, early, steps=2, after_step=functools.partial(read, model))

    assert_same(run(ours, MODES[mode]()), run(theirs, Resident()))
    assert WORKER in threads


@pytest.mark.parametrize("mode", MODES)
def test_the_host_goes_on_while_the_worker_updates(mode: str, monkeypatch: pytest.MonkeyPatch):
    gate = held_up(monkeypatch)
    model, mode = made(Stack), MODES[mode]()
    with updating(mode, model, early=False) as (attached, optimizer):
        one_step(model, attached)
        before = model.blocks[0].up.weight.detach().clone()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(model.blocks[0].up.weight, before)
        assert attached.counters().updated_parameters == 0
        gate.set()
        optimizer.finish()
        assert not torch.equal(model.blocks[0].up.weight, before)
        counters = attached.counters()
        resident = sum(p.numel() for p in model.parameters() if p.requires_grad) - counters.updated_parameters
        assert 0 <= resident < counters.updated_parameters
        assert counters.update_ms > 0
        assert counters.update_wait_ms > 0


def test_early_updates_begin_in_backward():
    model, mode = made(Stack), LayerStream(slots=2)
    with updating(mode, model, early=True) as (attached, optimizer):
        for step in range(2):
            optimizer.zero_grad()
            one_step(model, attached, step, microbatches=3)
            if step == 0:
                optimizer.step()
        optimizer.finish()
        per_step = sum(p.numel() for p in model.blocks.parameters())
        assert attached.counters().updated_parameters == 2 * per_step


class WorkerError(Exception):
    """The worker's error in these tests."""


def failing(monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Makes the worker's update number `at` raise WorkerError."""
    apply, count = HostAdamW.apply, 0

    def broken_apply(self, claims, scale=1.0):
        nonlocal count
        if threading.current_thread().name == WORKER:
            count += 1
            if count == at:
                raise WorkerError("no more")
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", broken_apply)


def steps_until(wait: Callable, model: nn.Module, mode, optimizer: HostAdamW) -> None:
    for step in range(4):
        one_step(model, mode, step)
        optimizer.step()
        optimizer.zero_grad()
        wait(model, mode, optimizer)


WAITS = {
    "the next step": lambda model, mode, optimizer: one_step(model, mode),
    "evaluation": lambda model, mode, optimizer: torch.no_grad()(model)(stack_inputs(0, 0)),
    "optimizer.state_dict": lambda model, mode, optimizer: optimizer.state_dict(),
    "model.state_dict": lambda model, mode, optimizer: model.state_dict(),
    "finish": lambda model, mode, optimizer: optimizer.finish(),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.parametrize("at", [1, 4])
def test_an_error_of_the_worker_is_raised_by_the_next_wait(at: int, wait: str, monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, at)
    model, mode = made(functools.partial(Stack, depth=8)), LayerStream(slots=2)
    with updating(mode, model, early=False) as (attached, optimizer):
        with pytest.raises(WorkerError, match="no more") as caught:
            steps_until(WAITS[wait], model, attached, optimizer)
        frames = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
        assert frames[-1] == "broken_apply"
        assert "_work" in frames
        with pytest.raises(WorkerError) as again:
            optimizer.finish()
        assert again.value is caught.value
    assert no_worker_lives()
    model(stack_inputs(0, 0)).sum().backward()


@pytest.mark.parametrize("mode", MODES)
def test_an_error_that_nobody_waited_for_is_raised_by_detach(mode: str, monkeypatch: pytest.MonkeyPatch):
    """The model is given back all the same."""
    failing(monkeypatch, at=1)
    model, mode = made(Stack), MODES[mode]()

    def step_and_detach() -> None:
        with updating(mode, model, early=False) as (attached, optimizer):
            one_step(model, attached)
            optimizer.step()

    with pytest.raises(WorkerError, match="no more"):
        step_and_detach()
    assert_given_back(model, "cpu")
    with under(mode, model) as attached, attached.step():
        model(stack_inputs(0, 0)).sum().backward()


@pytest.mark.parametrize("call", ["query", "synchronize"])
def test_an_error_of_the_worker_between_updates_is_raised_too(call: str, monkeypatch: pytest.MonkeyPatch):
    """Events of a failed device raise while the worker chooses a job, or waits for its gradients."""
    ask = getattr(CheckedEvent, call)

    def broken(event: CheckedEvent):
        if threading.current_thread().name == WORKER:
            raise WorkerError("an illegal memory access was encountered")
        return ask(event)

    monkeypatch.setattr(CheckedEvent, call, broken)
    model, mode = made(Stack), LayerStream(slots=2)
    with (
        updating(mode, model, early=False) as (attached, optimizer),
        pytest.raises(WorkerError, match="illegal memory access"),
    ):
        steps_until(WAITS["finish"], model, attached, optimizer)
    assert no_worker_lives()


def test_an_error_in_backward_ends_the_step(monkeypatch: pytest.MonkeyPatch):
    failing(monkeypatch, at=6)
    eager(monkeypatch)
    model, mode = made(Stack), LayerStream(slots=2)
    with updating(mode, model, early=True) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        optimizer.zero_grad()
        with pytest.raises(WorkerError):
            one_step(model, attached)
    assert no_worker_lives()
    assert not any("forward" in vars(module) for module in model.modules())


def test_an_error_at_the_end_of_a_step_does_not_stop_detach(monkeypatch: pytest.MonkeyPatch):
    """The worker fails while the slots hold units that it was to update."""
    failing(monkeypatch, at=5)
    gate = held_up(monkeypatch)
    model, mode = made(Stack), LayerStream(slots=3)

    def step_in_which_the_worker_ends() -> None:
        with attached.step():
            attached.accumulate([lambda: model(stack_inputs(0, 0)).sum()])
            gate.set()
            deadline = time.monotonic() + 300
            while not no_worker_lives() and time.monotonic() < deadline:
                time.sleep(0.001)

    with updating(mode, model, early=True) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        gate.set()
        optimizer.finish()
        gate.clear()
        optimizer.zero_grad()
        with pytest.raises(WorkerError):
            step_in_which_the_worker_ends()
    assert not any("forward" in vars(module) for module in model.modules())
    model(stack_inputs(0, 0)).sum().backward()


def test_detach_ends_the_worker_after_the_updates_that_were_offered(monkeypatch: pytest.MonkeyPatch):
    sleepy(monkeypatch, 0.02)
    model, mode = made(Stack), LayerStream()
    with updating(mode, model, early=False) as (attached, optimizer):
        assert no_worker_lives()
        one_step(model, attached)
        before = copy.deepcopy(model.blocks.state_dict())
        optimizer.step()
        assert not no_worker_lives()
    assert no_worker_lives()
    assert all(not torch.equal(before[name], tensor) for name, tensor in model.blocks.state_dict().items())
    # Now it is the optimizer of an ordinary model.
    model(stack_inputs(0, 0)).sum().backward()
    weight = model.blocks[0].up.weight.detach().clone()
    optimizer.step()
    assert not torch.equal(weight, model.blocks[0].up.weight)


@pytest.mark.slow
def test_a_process_may_end_in_an_update():
    script = """
from tests.offload.helpers.models import Stack
from tests.offload.helpers.updates import host_adamw, made, one_step
from offload.modes.layer_stream import LayerStream
from offload.streams import registry

model, mode = made(Stack), LayerStream()
attached = mode.attach(model, registry.acquire("cpu"))
optimizer = host_adamw(model)
attached.overlap(optimizer, early=False)
one_step(model, attached)
optimizer.step()
"""
    result = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert (result.returncode, result.stderr) == (0, "")


def test_a_mode_that_is_dropped_after_updates_is_freed_and_its_thread_ends():
    streams = registry.acquire("cpu")
    model = made(Stack)
    attached = LayerStream().attach(model, streams)
    optimizer = HostAdamW(model.parameters(), lr=0.1)
    attached.overlap(optimizer, early=False)
    one_step(model, attached, 0)
    optimizer.step()
    optimizer.finish()
    left = weakref.ref(model)
    del model, attached, optimizer
    deadline = time.monotonic() + 300
    while left() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert left() is None
    assert no_worker_lives()
    registry.release(streams)


def note_order(monkeypatch: pytest.MonkeyPatch, model: Stack) -> list[int]:
    """Returns a list that gets the number of each block as its update begins."""
    index_of = {block.up.weight: index for index, block in enumerate(model.blocks)}
    apply, order = HostAdamW.apply, []

    def noting(self, claims, scale=1.0):
        order.extend(index_of[claim.parameter] for claim in claims if claim.parameter in index_of)
        apply(self, claims, scale)

    monkeypatch.setattr(HostAdamW, "apply", noting)
    return order


def order_of_updates(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Returns the order of blocks in a step of early updates; the first waits until all gradients have landed."""
    model, mode = made(functools.partial(Stack, depth=6)), LayerStream(slots=2)
    gate, order = held_up(monkeypatch), note_order(monkeypatch, model)
    with updating(mode, model, early=True) as (attached, optimizer):
        for step in range(2):
            gate.clear()
            order.clear()
            one_step(model, attached, step)
            gate.set()
            optimizer.step()
            optimizer.finish()
            optimizer.zero_grad()
    return order


def test_of_the_units_that_have_landed_the_one_needed_first_is_updated_first(monkeypatch: pytest.MonkeyPatch):
    order = order_of_updates(monkeypatch)
    # Before the others landed, the worker had begun with one block, as a rule the last.
    assert sorted(order) == list(range(6))
    assert order[1:] == sorted(order[1:])


def test_gradients_behind_one_that_has_not_landed_are_not_queried(monkeypatch: pytest.MonkeyPatch):
    """Each query takes time, and there may be hundreds of gradients."""
    asked = []
    monkeypatch.setattr(CheckedEvent, "query", lambda event: asked.append(event) or len(asked) > 3)
    assert len(order_of_updates(monkeypatch)) == 6
    # Three queries in vain, and one for each gradient of two steps.
    parameters = len(list(Stack().blocks[0].parameters()))
    assert len(asked) <= 3 + 2 * 6 * parameters


def test_where_no_unit_has_landed_the_worker_waits_for_the_first_offered(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(CheckedEvent, "query", lambda event: False)
    assert order_of_updates(monkeypatch) == [5, 4, 3, 2, 1, 0]


def test_updates_that_step_starts_are_in_the_order_of_the_next_forward(monkeypatch: pytest.MonkeyPatch):
    """The order of use, not that of the model's blocks."""

    class Backwards(Stack):
        def forward(self, inputs):
            hidden = self.stem(inputs)
            for block in reversed(self.blocks):
                hidden = block(hidden)
            return self.head(hidden)

    model, mode = made(Backwards), LayerStream(slots=2)
    order = note_order(monkeypatch, model)
    # No gradient seems to have landed, so the worker takes them in the order of their offers.
    monkeypatch.setattr(CheckedEvent, "query", lambda event: False)
    with updating(mode, model, early=False) as (attached, optimizer):
        one_step(model, attached)
        optimizer.step()
        optimizer.finish()
    assert order == [3, 2, 1, 0]
