"""A mode over another: everything about weights is left to that one, and errors say whose knob it is."""

from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch

from offload.knobs import KnobError
from offload.modes.activation_mode import ActivationMode, MovedActivations
from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.modes.none import Resident
from offload.modes.save_on_cpu import SaveOnCpu
from offload.modes.shard_offload import ShardOffload
from offload.modes.tensor_swap import TensorSwap
from offload.streams.transfer import Counters
from tests.offload.helpers.models import Stack, same_as_resident, stack_inputs, under


@dataclass(kw_only=True, eq=False)
class Watching(ActivationMode):
    def activations(self, model, streams):
        return Watched(model)


class Watched(MovedActivations):
    """Notes what it is called for."""

    def __init__(self, model):
        super().__init__(model)
        self.seen = []

    @contextmanager
    def around_forward(self, arguments, keywords):
        self.seen.append("open")
        try:
            yield
        finally:
            self.seen.append("close")

    @contextmanager
    def around_step(self):
        self.seen.append("begin")
        yield
        self.seen.append("end")

    def counters(self) -> Counters:
        return Counters(swapped_bytes=5, host_pageable_bytes=7)


def test_contexts_are_open_around_calls_in_steps_with_gradients_only():
    mode, model = Watching(Resident()), Stack()
    with under(mode, model) as attached:
        with torch.no_grad():
            model(stack_inputs(0, 0))
        assert attached.activations.seen == []
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        assert attached.activations.seen == ["begin", "open", "close", "end"]


@pytest.mark.parametrize("mode", [TensorSwap, SaveOnCpu])
@pytest.mark.parametrize("weights", [Resident, LayerStream])
@pytest.mark.parametrize("trains", ["parameters", "inputs"])
def test_a_forward_with_gradients_outside_of_a_step_is_refused(mode: type, weights: type, trains: str):
    """It would move nothing, and nobody would know."""
    made, model, inputs = mode(weights()), Stack(), stack_inputs(0, 0)
    with under(made, model) as attached:
        model.requires_grad_(trains == "parameters")
        inputs.requires_grad_(trains == "inputs")
        with pytest.raises(
            RuntimeError, match=r"^forward with gradients outside a step: wrap .* `with attached\.step\(\):`"
        ):
            model(inputs)
        with attached.step():
            model(inputs).sum().backward()
        model.requires_grad_(False)
        assert not model(inputs.detach()).requires_grad


def test_backward_may_come_after_the_step():
    model, mode = Stack(recompute="non-reentrant"), TensorSwap(Resident())
    with under(mode, model) as attached:
        with attached.step():
            loss = model(stack_inputs(0, 0)).sum()
        loss.backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize("mode", [TensorSwap, SaveOnCpu])
def test_after_an_attach_that_failed_the_model_is_as_it_was_found(mode: type, monkeypatch: pytest.MonkeyPatch):
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    model, made = Stack(), mode(LayerStream())
    monkeypatch.setattr(mode, "activations", fail)
    before = [set(vars(module)) for module in model.modules()]
    with pytest.raises(ZeroDivisionError), under(made, model):
        pass
    assert [set(vars(module)) for module in model.modules()] == before
    monkeypatch.undo()
    same_as_resident(model, made)


def test_everything_about_weights_is_left_to_their_mode():
    weights = LayerStream(slots=1)
    mode, model = Watching(weights), Stack()
    same_as_resident(model, mode)
    with under(mode, model) as attached:
        with attached.step(norms=True):
            attached.accumulate([lambda: model(stack_inputs(0, 0)).sum()])
        assert attached.gradient_norms().keys() == set(model.blocks.parameters())
        moved = attached._streamer.counters()
        assert moved.h2d_bytes > 0
        assert attached.counters() == moved + Counters(swapped_bytes=5, host_pageable_bytes=7)
    assert mode.footprint(model) == weights.footprint(model)
    assert Watching(ShardOffload()).recomputes
    assert not Watching(ShardOffload(checkpoint=False)).recomputes


class OtherSystem(Resident):
    """A mode that hands the model to another system, which would never get it from a mode above."""

    foreign = True


def test_another_system_runs_alone():
    with pytest.raises(KnobError, match=r"^weights=test_activation_mode: is another system, which runs"):
        Watching(OtherSystem())


@pytest.mark.parametrize("weights", [TensorSwap(Resident()), SaveOnCpu(Resident())])
def test_weights_are_a_mode_of_weights(weights: ActivationMode):
    name = type(weights).__module__.rpartition(".")[2]
    with pytest.raises(KnobError, match=f"^weights={name}: moves activations itself; choose none"):
        Watching(weights)


@pytest.mark.parametrize("mode", [TensorSwap, SaveOnCpu])
@pytest.mark.parametrize("call", ["footprint", "attach"])
@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (LayerStream(resident=99), "weights.resident=99: the model has 4 units"),
        (BounceLinear(resident="4"), None),
        (LayerStream(layers="nowhere"), "weights.layers=nowhere: no list of blocks there"),
        (ShardOffload(shards=9), "weights.shards=9: must be between 1 and the number of blocks, 4"),
    ],
)
def test_a_knob_of_the_weights_is_named_with_its_path(mode: type, weights, message: str | None, call: str):
    made = mode(weights)
    if message is None:
        assert made.footprint(Stack()).units == 6
        return
    with pytest.raises(KnobError) as caught:
        getattr(made, call)(Stack(), *([None] if call == "attach" else []))
    assert str(caught.value).startswith(message)
