"""Gradients go to different places as they land."""

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.modes.mode import Attached
from offload.weights.gradients.landing import GradientLanding
from offload.weights.gradients.seams import Updates
from tests.offload.helpers.models import Stack, stack_inputs, under


@pytest.fixture
def attached() -> Iterator[Attached]:
    with under(LayerStream(slots=2), Stack(depth=2)) as attached:
        yield attached


@pytest.fixture
def model(attached: Attached) -> Stack:
    return attached.model


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(stack_inputs(0, 0)).square().sum()


def landing_of(attached: LayerStream) -> GradientLanding:
    return attached._streamer.gradients


def test_small_gradients_leave_at_the_latest_where_backward_ends(model: Stack, attached: LayerStream):
    landing, weight = landing_of(attached), model.blocks[0].norm.weight
    trained = [tensor for unit in attached._streamer.cut.units for tensor in unit.trained]
    waiting: list[bool] = []

    send = landing.offloader.send

    def noted() -> list:
        waiting.append(not landing.offloader.waiting.keys().isdisjoint(trained))
        return send()

    landing.offloader.send = noted
    with attached.step():
        attached.accumulate([lambda: loss_of(model)])
        assert not any(tensor in landing.offloader.waiting for tensor in trained)
        assert weight.grad is not None
    assert any(waiting)


def test_a_backward_of_the_caller_waits_for_gradients_where_it_ends(model: Stack, attached: LayerStream):
    with attached.step():
        loss_of(model).backward()
        found = [p.grad.clone() for p in model.blocks[0].parameters()]
    assert all(torch.equal(p.grad, early) for p, early in zip(model.blocks[0].parameters(), found, strict=True))


def test_updates_get_final_gradients_of_a_unit_together(model: Stack, attached: LayerStream):
    class Recorded(Updates):
        early = True

        def __init__(self) -> None:
            self.landed: list[tuple[str, int]] = []

        def gradients_landed(self, unit, tensors, after, released=None) -> None:
            self.landed.append((unit.name, len(tensors)))

    updates = Recorded()
    attached._streamer.use_updates(updates)
    for _ in range(2):
        updates.landed.clear()
        with attached.step():
            attached.accumulate([lambda: loss_of(model)])
        model.zero_grad()
    count = len(list(model.blocks[0].parameters()))
    totals = {name: sum(n for unit, n in updates.landed if unit == name) for name in ("blocks.1", "blocks.0")}
    assert totals == {"blocks.1": count, "blocks.0": count}
    assert len(updates.landed) < 2 * count


def test_a_gradient_of_the_host_waits_while_others_are_being_sent(model: Stack, attached: LayerStream, monkeypatch):
    """On a GPU autograd adds it in another thread. It is set only at the end of `send`, which must be over by then."""
    landing, order = landing_of(attached), []
    unit = landing._units[0]
    sending, send = threading.Event(), landing.offloader.send

    def slow_send() -> list:
        if threading.current_thread() is threading.main_thread():
            sending.set()
            other.join(0.2)
            order.append("sent")
        return send()

    def before() -> None:
        sending.wait(300)
        landing.before_host_gradient(unit, unit.tensors[0])
        order.append("added")

    other = threading.Thread(target=before)
    other.start()
    with attached.step():
        loss = loss_of(model)
        # A batch is full with every gradient.
        landing.offloader._batch_bytes = 0
        with monkeypatch.context() as patch:
            patch.setattr(landing.offloader, "send", slow_send)
            loss.backward()
    other.join(300)
    assert order[0] == "sent"
