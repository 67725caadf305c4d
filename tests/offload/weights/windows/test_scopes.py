"""A scope refuses changes to its copies; each thread has scopes of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch import nn

from offload.weights.units.unit import OffloadUnit
from offload.weights.windows.scopes import RunningForwards, Scope, ThreadForwards
from tests.offload.helpers.units import tensor_of


def test_a_changed_copy_is_refused():
    module = nn.Linear(2, 2)
    scope, copy = Scope(module), module.weight.detach().clone()
    scope.copies[tensor_of(module.weight)] = copy
    scope.check_copies()
    copy.add_(1)
    with pytest.raises(RuntimeError, match="was changed in a forward while all device slots are in use"):
        scope.check_copies()


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
        scope.units.append(unit)
        running.units.add(unit)
    running.end(inner)
    assert running.units == {unit}
    running.end(outer)
    assert not running.units
    assert outer.units == [unit]
