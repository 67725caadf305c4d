"""The order in which the worker makes updates: first those of what the next forward needs first."""

import functools

import pytest

from offload.modes.layer_stream import LayerStream
from offload.optimizer.adamw import HostAdamW
from offload.streams.stream_checker import CheckedEvent
from tests.offload.helpers.models import Stack
from tests.offload.helpers.updates import held_up, made, one_step, updating

pytestmark = pytest.mark.usefixtures("small")


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
