"""An idle thread ends, and refers to nothing that its user has dropped; one mode has an optimizer."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.optimizer.adamw import HostAdamW
from offload.optimizer.worker import UpdateWorker
from offload.streams import registry
from tests.offload.helpers.models import Stack, assert_same, attached, with_copy
from tests.offload.helpers.updates import host_adamw, made, no_worker_lives, one_step, train

pytestmark = pytest.mark.usefixtures("small")


def test_an_idle_thread_ends_and_the_next_offer_starts_another(monkeypatch: pytest.MonkeyPatch):
    started = []
    start = UpdateWorker._start

    def noted_start(self: UpdateWorker) -> None:
        before = self._thread
        start(self)
        if self._thread is not before:
            started.append(self._thread)

    monkeypatch.setattr(UpdateWorker, "_start", noted_start)
    monkeypatch.setattr("offload.optimizer.worker.IDLE_S", 0.0)
    ours, theirs = with_copy(made(Stack))
    assert_same(train(ours, LayerStream(), early=True, steps=3), train(theirs, Resident(), steps=3))
    assert len(started) > 1
    assert no_worker_lives()


def test_a_mode_that_is_dropped_after_updates_is_freed(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offload.optimizer.worker.IDLE_S", 0.01)
    streams = registry.acquire("cpu")
    model, mode = made(Stack), LayerStream()
    mode.attach(model, streams)
    optimizer = HostAdamW(model.parameters(), lr=0.1)
    mode.overlap(optimizer, early=False)
    one_step(model, mode, 0)
    optimizer.step()
    optimizer.finish()
    left = weakref.ref(model)
    del model, mode, optimizer
    deadline = time.monotonic() + 300
    while left() is not None and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert left() is None
    registry.release(streams)


@pytest.mark.parametrize("early", [False, True])
def test_the_updates_of_an_optimizer_are_made_by_one_mode(early: bool):
    first, second = made(Stack, torch.float32), made(Stack, torch.float32)
    optimizer = host_adamw(nn.ModuleList([first, second]))
    mode, other = LayerStream(), LayerStream()
    with attached(mode, first):
        mode.overlap(optimizer, early)
        # Once more for the same mode.
        mode.overlap(optimizer, early)
        with attached(other, second):
            with pytest.raises(RuntimeError, match="a mode makes the updates of this optimizer already"):
                other.overlap(optimizer, early)
            one_step(first, mode)
            optimizer.step()
    assert optimizer.state
    with attached(other, second):
        other.overlap(optimizer, early)
