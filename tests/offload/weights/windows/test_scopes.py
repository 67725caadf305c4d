"""A scope refuses changes to its copies; each thread has scopes of its own."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from offload.modes.layer_stream import LayerStream
from offload.weights.units.placement import ModuleAttribute
from offload.weights.units.unit import OffloadUnit
from offload.weights.units.unit_tensor import UnitTensor
from offload.weights.windows.scopes import RunningForwards, Scope, ThreadForwards
from tests.offload.helpers.models import attached
from tests.offload.helpers.quantised import Nested


def scope_with_a_copy(is_buffer: bool) -> tuple[Scope, torch.Tensor]:
    module = nn.BatchNorm1d(2)
    name = "running_mean" if is_buffer else "weight"
    host = getattr(module, name)
    tensor = UnitTensor(name, host, [ModuleAttribute(module, name, is_buffer)], 0)
    copy = host.detach().clone()
    scope = Scope(module)
    scope.keep(tensor, copy)
    return scope, copy


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_changed_copy_is_refused(is_buffer: bool):
    scope, copy = scope_with_a_copy(is_buffer)
    scope.check_copies()
    copy.add_(1)
    with pytest.raises(RuntimeError, match="was changed in a forward while all device slots are in use"):
        scope.check_copies()


def a_part_is_written(weight: Nested) -> None:
    weight.scale.mul_(2)


def a_part_is_replaced(weight: Nested) -> None:
    weight.scale = weight.scale * 2


@pytest.mark.parametrize("change", [a_part_is_written, a_part_is_replaced])
def test_a_changed_copy_of_a_quantised_weight_is_refused(change: Callable[[Nested], None]):
    """The second module of a weight in common changes it, before its forward has a window."""
    layers = [nn.Linear(16, 16) for _ in range(3)]
    for layer in layers:
        layer.weight = nn.Parameter(Nested.of(layer.weight.detach()), requires_grad=False)
    layers[2].weight = layers[0].weight
    layers[2].register_forward_pre_hook(lambda module, _: change(module.weight))
    model, mode = nn.Sequential(*layers), LayerStream(slots=2)
    with (
        attached(mode, model),
        pytest.raises(RuntimeError, match="was changed in a forward while all device slots are in use"),
        mode.step(),
        torch.no_grad(),
    ):
        model(torch.ones(2, 16))


def test_scopes_belong_to_a_thread():
    threads = ThreadForwards()
    threads.running.scopes.append(Scope(nn.Identity()))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: threads.running.scopes).result() == []


def test_a_unit_is_open_until_the_last_scope_that_opened_it_ends():
    running, unit = RunningForwards(), OffloadUnit("unit", 0)
    outer, inner = Scope(nn.Identity()), Scope(nn.Identity())
    for scope in (outer, inner):
        running.scopes.append(scope)
        running.opened(unit, scope)
    running.end(inner)
    assert running.units == {unit}
    running.end(outer)
    assert not running.units
    assert outer.units == [unit]
