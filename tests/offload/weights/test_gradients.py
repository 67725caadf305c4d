"""Gradients that land: copied, added to earlier ones, measured, and taken for final where the last step showed it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload.modes.bounce_linear import BounceLinear
from offload.modes.layer_stream import LayerStream
from offload.runtime import registry
from offload.runtime.host_memory import HostArena
from offload.runtime.stream_checker import CheckedStreams
from offload.runtime.transfer import Telemetry, Transfer
from offload.weights.gradients import FinalGradients, GradientOffloader
from offload.weights.placement import ModuleAttribute
from offload.weights.unit_tensor import UnitTensor
from offload.weights.units import OffloadUnit
from tests.offload.helpers.models import Stack, attached
from tests.offload.helpers.updates import DTYPES, MODES, Mixed, made, make_small, one_step
from training.loop import gradient_norm


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(monkeypatch)


@pytest.fixture
def unit() -> OffloadUnit:
    def tensor(name: str) -> UnitTensor:
        return UnitTensor(name, nn.Parameter(torch.zeros(1)), [ModuleAttribute(nn.Module(), name, False)], 0)

    return OffloadUnit("block", 0, [tensor("first"), tensor("second")])


def step(final: FinalGradients, unit: OffloadUnit, *events: str) -> list[bool]:
    """`+0` lands the gradient of tensor 0, `?0` uses the tensor. Returns whether each landed gradient was final."""
    final.begin_step([unit])
    final.counting = True
    found = []
    for kind, index in events:
        tensor = unit.tensors[int(index)]
        if kind == "+":
            found.append(final.land(unit, tensor))
        else:
            final.use(unit, tensor)
    final.end_step()
    return found


def test_a_gradient_is_final_if_all_of_its_unit_landed_once_in_the_step_before(unit: OffloadUnit):
    final = FinalGradients()
    assert step(final, unit, "?0", "?1", "+1", "+0") == [False, False]
    assert step(final, unit, "?0", "?1", "+1", "+0") == [True, True]
    assert step(final, unit, "+1") == [True]
    assert step(final, unit, "+1", "+0") == [False, False]
    assert step(final, unit, "+1", "+0") == [True, True]


def test_a_unit_whose_weights_are_used_after_their_gradients_is_not_trusted(unit: OffloadUnit):
    final = FinalGradients()
    for _ in range(3):
        assert step(final, unit, "+1", "?1", "+0") == [False, False]
    assert step(final, unit, "+1", "?0", "+0") == [False, False]
    assert step(final, unit, "+1", "?0", "+0") == [True, True]


def test_pieces_of_a_gradient_are_not_final(unit: OffloadUnit):
    final = FinalGradients()
    for _ in range(3):
        assert step(final, unit, "+1", "+0", "+0") == [False] * 3


@pytest.mark.parametrize(("late", "message"), [("+0", "came after the last"), ("?0", "is needed after its gradient")])
def test_late_gradients_and_uses_that_are_new_in_this_step_are_refused(late: str, message: str, unit: OffloadUnit):
    final = FinalGradients()
    step(final, unit, "+1", "+0")
    with pytest.raises(RuntimeError, match=f"first {message}"):
        step(final, unit, "+1", "+0", late)


def test_nothing_is_refused_outside_of_steps_and_nothing_learned_before_it_counts(unit: OffloadUnit):
    final = FinalGradients()
    step(final, unit, "+1", "+0")
    step(final, unit, "+1", "+0")
    final.use(unit, unit.tensors[0])
    final.begin_step([unit])
    assert [final.land(unit, tensor) for tensor in unit.tensors] == [False, False]


@pytest.fixture
def streams() -> Iterator[CheckedStreams]:
    streams = registry.acquire("cpu")
    yield streams
    registry.release(streams)


@pytest.fixture
def at_home(unit: OffloadUnit) -> OffloadUnit:
    unit.bring_home(HostArena(torch.device("cpu")))
    return unit


def of(value: float) -> torch.Tensor:
    """A gradient on the device."""
    return torch.full((1,), value)


def test_a_gradient_lands_in_host_memory(at_home: OffloadUnit, streams: CheckedStreams):
    tensor, on_device = at_home.tensors[0], of(2.0)
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=64)
    gradients.begin_step([at_home], norms=False)
    leaving = gradients.land(tensor, on_device)
    assert leaving.tensor is on_device
    assert tensor.host.grad is tensor.gradient
    assert tensor.gradient.item() == 2.0
    assert tensor.has_landed_gradient
    assert gradients.norms([at_home]) == {}
    tensor.gradient.mul_(2)
    assert not tensor.has_landed_gradient


def test_a_second_gradient_is_added_and_norms_are_of_the_sum(at_home: OffloadUnit, streams: CheckedStreams):
    first, second = at_home.tensors
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=64)
    gradients.begin_step([at_home], norms=True)
    for tensor, value in ((first, 2.0), (second, 1.0), (first, -5.0)):
        gradients.free(gradients.land(tensor, of(value)))
    gradients.release()
    assert (first.gradient.item(), second.gradient.item()) == (-3.0, 1.0)
    assert {parameter: norm.item() for parameter, norm in gradients.norms([at_home]).items()} == {
        first.host: 3.0,
        second.host: 1.0,
    }
    second.host.grad = torch.ones(1)
    assert set(gradients.norms([at_home])) == {first.host}
    gradients.begin_step([at_home], norms=True)
    assert gradients.norms([at_home]) == {}


def test_compute_waits_for_the_oldest_gradients_beyond_the_limit(at_home: OffloadUnit, streams: CheckedStreams):
    telemetry = Telemetry(streams)
    transfer = Transfer(streams, telemetry)
    gradients, waited = GradientOffloader(transfer, limit_bytes=4), []
    transfer.await_on = lambda stream, event: waited.append(event)
    leaving = [gradients.land(tensor, of(1.0)) for tensor in at_home.tensors]
    for one in leaving:
        streams.compute.wait_event(one.done)
        gradients.free(one)
    assert waited == [leaving[0].done]
    gradients.release()
    assert waited == [one.done for one in leaving]


@pytest.mark.parametrize("microbatches", [1, 3])
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_taken_on_the_way_are_those_of_the_gradients(dtype: str, mode: str, microbatches: int):
    model, mode = made(Mixed, DTYPES[dtype]), MODES[mode]()
    with attached(mode, model):
        for step in range(4):
            one_step(model, mode, step, microbatches, norms=step != 1)
            norms = mode.gradient_norms()
            trained = [p for p in model.blocks[0].parameters() if p.grad is not None]
            assert set(norms) >= set(trained) if step != 1 else not norms
            assert set(norms) <= {p for p in model.parameters() if p.grad is not None}
            for parameter, norm in norms.items():
                assert norm.dtype == torch.float32
                assert norm.item() == pytest.approx(parameter.grad.double().norm().item(), rel=1e-6)
            whole = torch.stack([p.grad.double().norm() for p in model.parameters() if p.grad is not None]).norm()
            assert gradient_norm(model, norms) == pytest.approx(whole.item(), rel=1e-6)
            model.zero_grad()


@pytest.mark.parametrize("who", ["a hook", "the caller"])
def test_norms_are_of_gradients_as_they_are_when_asked_for(who: str):
    def grow(parameter: nn.Parameter) -> None:
        parameter.grad.mul_(10)

    model, mode = made(Stack), LayerStream(slots=2)
    changed = list(model.blocks[1].parameters())
    if who == "a hook":
        for parameter in changed:
            parameter.register_post_accumulate_grad_hook(grow)
    with attached(mode, model):
        one_step(model, mode, norms=True)
        if who == "the caller":
            for parameter in changed:
                grow(parameter)
        norms = mode.gradient_norms()
        assert norms
        assert gradient_norm(model, norms) == pytest.approx(gradient_norm(model, {}), rel=1e-6)


def test_norms_of_gradients_that_are_added_to_earlier_ones():
    """Gradients accumulate over two steps; the norm is that of the sum."""
    model, mode = made(Stack), BounceLinear(slots=2)
    with attached(mode, model):
        for step in range(2):
            one_step(model, mode, step, norms=True)
        for parameter, norm in mode.gradient_norms().items():
            assert norm.item() == pytest.approx(parameter.grad.double().norm().item(), rel=1e-6)


def test_an_assigned_gradient_is_added_to_in_place(at_home: OffloadUnit, streams: CheckedStreams):
    tensor, assigned = at_home.tensors[0], torch.ones(1)
    gradients = GradientOffloader(Transfer(streams, Telemetry(streams)), limit_bytes=64)
    tensor.host.grad = assigned
    gradients.free(gradients.land(tensor, of(2.0)))
    assert tensor.host.grad is assigned
    assert assigned.item() == 3.0
    assert tensor.has_landed_gradient
    assert tensor.gradient.item() == 0.0
    gradients.release()
