"""Steps, attaching and detaching: what may happen around and inside them, and what is refused."""

import copy
import time

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.optimizer.kernels import FusedUpdate
from offload.streams import registry
from offload.streams.stream_checker import StreamOrderError
from offload.weights import streamer
from tests.offload.helpers.models import Stack, assert_same, stack_inputs, train, under, with_copy
from tests.offload.helpers.updates import host_adamw, one_step


@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("mode", [BounceLinear(slots=2), LayerStream(slots=2)], ids=lambda mode: type(mode).__name__)
def test_the_host_does_not_wait_for_compute_at_the_end_of_a_step(mode, trains: bool):
    """So it can give compute the next step meanwhile; the stream checker sees that it has waited for the homes."""
    model, streams = Stack(), registry.acquire("cpu")
    model.blocks.requires_grad_(trains)
    with under(mode, model) as attached:
        for _ in range(2):
            last = nn.Identity()
            with attached.step():
                model(stack_inputs(0, 0)).square().mean().backward()
                streams.writes(streams.compute, last, "the end of backward")
            with pytest.raises(StreamOrderError, match="the end of backward"):
                streams.reads(None, last, "a read on the host")
            for parameter in model.parameters():
                parameter.grad = None
    registry.release(streams)


CHANGES = {
    "data": lambda model: setattr(model.blocks[1].up.weight, "data", model.blocks[1].up.weight.data.clone()),
    "a parameter": lambda model: setattr(
        model.blocks[1].up, "weight", nn.Parameter(model.blocks[1].up.weight.detach())
    ),
    "an order": lambda model: setattr(
        model.blocks[1].up.weight, "data", model.blocks[1].up.weight.data.t().clone().t()
    ),
    "all": lambda model: model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_has_not_changed_since_the_last_step_is_looked_at_once(change: str, monkeypatch: pytest.MonkeyPatch):
    """A step begins while the device waits for the host."""
    model, mode, looked_at = Stack(), LayerStream(slots=2), []
    take = streamer.take_changes
    monkeypatch.setattr(streamer, "take_changes", lambda unit, *rest: (looked_at.append(unit.index), take(unit, *rest)))
    with under(mode, model) as attached:
        one_step(model, attached)
        one_step(model, attached)
        assert looked_at == []
        CHANGES[change](model)
        one_step(model, attached)
        assert looked_at == ([0, 1, 2, 3] if change == "all" else [1])
        # Taken over: at home again.
        looked_at.clear()
        one_step(model, attached)
        assert looked_at == []


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_raises_leaves_the_next_one_right(where: str):
    class Raising(torch.autograd.Function):
        @staticmethod
        def forward(ctx, hidden):
            if where == "forward":
                raise KeyboardInterrupt
            return hidden.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ZeroDivisionError

    model, mode = Stack(), BounceLinear(slots=2)
    expected = train(copy.deepcopy(model), Resident(), steps=1, microbatches=1)
    body = model.blocks[2].up.forward
    with under(mode, model) as attached:
        model.blocks[2].up.forward = lambda hidden: Raising.apply(body(hidden))
        with pytest.raises((KeyboardInterrupt, ZeroDivisionError)), attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        del model.blocks[2].up.forward
        model.zero_grad()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
    assert_same(train(model, mode, steps=1, microbatches=1), expected)


def test_two_models_on_one_device_keep_apart():
    first, second = Stack(), Stack(depth=2)
    one, other = BounceLinear(slots=1), BounceLinear(slots=1)
    expected = train(copy.deepcopy(second), Resident())
    with under(one, first) as attached:
        with under(other, second), torch.no_grad():
            first(second(stack_inputs(0, 0)).repeat(1, 2))
        assert_same(train(second, BounceLinear(slots=2)), expected)
        with attached.step():
            first(stack_inputs(0, 0)).sum().backward()


def test_detach_gives_the_model_back():
    model = Stack()
    parameters = list(model.parameters())
    mode = BounceLinear()
    state = copy.deepcopy(model.state_dict())
    with under(mode, model):
        assert list(model.state_dict()) == list(state)
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert not any("forward" in module.__dict__ for module in model.modules())
    model(stack_inputs(0, 0)).sum().backward()


def test_gradients_outside_a_step_are_refused():
    model, mode = Stack(), BounceLinear()
    with under(mode, model):
        with pytest.raises(RuntimeError, match=r"with attached\.step"):
            model(stack_inputs(0, 0))
        with torch.no_grad():
            model(stack_inputs(0, 0))


@pytest.mark.parametrize("device_share", [0, 10**9])
def test_data_given_before_the_step_is_taken_over_after_its_update(device_share: int, monkeypatch: pytest.MonkeyPatch):
    """The next step moves such data home, and the worker's kernel may be writing to it."""
    update, results = FusedUpdate.__call__, []

    def late(self, operands, *arguments) -> None:
        time.sleep(0.005)
        update(self, operands, *arguments)

    monkeypatch.setattr(FusedUpdate, "__call__", late)
    for beside, model in enumerate(with_copy(Stack())):
        mode = LayerStream(slots=2)
        with under(mode, model) as attached:
            optimizer = host_adamw(model)
            if beside:
                attached.overlap(optimizer, False, device_share)
            for step in range(3):
                one_step(model, attached, step)
                for parameter in model.blocks[0].parameters():
                    parameter.data = parameter.data * 0.75
                optimizer.step()
                optimizer.zero_grad()
            optimizer.finish()
            results.append([parameter.detach().clone() for parameter in model.parameters()])
    assert_same(*results)
