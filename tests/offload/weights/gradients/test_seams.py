"""Streaming calls `Updates` in a fixed order; the core's own destination takes nothing."""

import inspect

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.optimizer.adamw import Deferral
from offload.optimizer.overlap import Overlap
from offload.speculation.updates import SpeculativeOverlap
from offload.streams.transfer import Counters, Transfer
from offload.weights.gradients.seams import NO_UPDATES, Destination, ImmediateUpdates, Updates
from tests.offload.helpers.models import Stack, stack_inputs, under


def methods(of: type) -> dict[str, list[str]]:
    """Returns the parameters of public methods, by name."""
    public = {name: value for name, value in vars(of).items() if callable(value) and not name.startswith("_")}
    return {name: list(inspect.signature(value).parameters) for name, value in public.items()}


@pytest.mark.parametrize("implementation", [ImmediateUpdates, Overlap, SpeculativeOverlap])
def test_implementations_take_what_streaming_gives(implementation: type):
    own = {name: parameters for name, parameters in methods(implementation).items() if name in methods(Updates)}
    assert own
    assert own.items() <= methods(Updates).items()


def test_overlap_has_every_method_that_an_optimizer_calls():
    assert methods(Deferral).items() <= methods(Overlap).items()


class Recorded(Updates):
    """Notes every call."""

    early = True

    def __init__(self, calls: list[str]):
        self.calls = calls

    def begin_step(self) -> None:
        self.calls.append("begin")

    def before_onload(self, unit) -> None:
        self.calls.append(f"before {unit}")

    def gradients_landed(self, unit, tensors, after) -> None:
        self.calls += [f"landed {tensor.name}" for tensor in tensors]

    def end_step(self) -> None:
        self.calls.append("end")

    def close(self) -> None:
        self.calls.append("close")


def test_a_step_calls_updates_in_order(monkeypatch: pytest.MonkeyPatch):
    calls, copy_in = [], Transfer.copy_in

    def noting(transfer: Transfer, *operands, what: str, **options) -> None:
        calls.append(f"copy {what}")
        copy_in(transfer, *operands, what=what, **options)

    model, mode = Stack(depth=2), LayerStream(slots=2)
    with under(mode, model) as attached:
        attached._streamer.use_updates(Recorded(calls))
        monkeypatch.setattr(Transfer, "copy_in", noting)
        for _ in range(2):
            calls.clear()
            with attached.step():
                attached.accumulate([lambda: model(stack_inputs(0, 0)).sum()])
            model.zero_grad()
        onloads = calls[1:5]
        assert calls[0] == "begin"
        assert onloads == ["before blocks.0", "copy blocks.0", "before blocks.1", "copy blocks.1"]
        # Gradients that landed once in the step before are final in this one.
        names = [f"landed blocks.{index}.{name}" for index in (1, 0) for name, _ in model.blocks[0].named_parameters()]
        assert sorted(calls[5:-1]) == sorted(names)
        assert [call[:15] for call in calls[5:-1]] == sorted((call[:15] for call in calls[5:-1]), reverse=True)
        assert calls[-1] == "end"
        calls.clear()
    assert calls == ["close"]


def test_gradients_that_updates_retain_are_not_freed():
    class Retaining(Updates):
        def __init__(self):
            self.kept = {}

        def retain_gradient(self, unit, tensor, gradient) -> bool:
            self.kept[tensor.name] = gradient
            return unit.name == "blocks.0"

    model, mode, updates, freed = Stack(depth=2), LayerStream(slots=2), Retaining(), []
    with under(mode, model) as attached:
        attached._streamer.use_updates(updates)
        attached._streamer.gradients.offloader.free = freed.extend
        with attached.step():
            model(stack_inputs(0, 0)).sum().backward()
        expected = {name: gradient for name, gradient in updates.kept.items() if name.startswith("blocks.1")}
        assert freed == list(expected.values())
        for name, gradient in updates.kept.items():
            assert torch.equal(gradient.tensor, model.get_parameter(name).grad)


def test_without_such_an_optimizer_nothing_is_pending():
    assert not NO_UPDATES.early
    assert not NO_UPDATES.is_pending(None)
    assert NO_UPDATES.counters() == Counters()


def test_it_leaves_all_gradients_to_their_homes():
    destination, norms = Destination(), {nn.Parameter(torch.ones(2)): torch.ones(())}
    assert not destination.takes_gradients
    assert not destination.take(None, None, torch.ones(2))
    assert destination.summed_parameters() == frozenset()
    assert destination.known_norms(norms) == norms
