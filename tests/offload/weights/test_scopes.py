"""A scope refuses changes to its copies; each thread has scopes of its own."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

from offload.weights.placement import ModuleAttribute
from offload.weights.scopes import RunningForwards, Scope
from offload.weights.unit_tensor import UnitTensor


def scope_with_a_copy(is_buffer: bool) -> tuple[Scope, torch.Tensor]:
    module = nn.BatchNorm1d(2)
    name = "running_mean" if is_buffer else "weight"
    host = getattr(module, name)
    tensor = UnitTensor(name, host, [ModuleAttribute(module, name, is_buffer)], 0)
    copy = host.detach().clone()
    scope = Scope(module, copies={tensor: copy})
    if is_buffer:
        scope.before[tensor] = copy.clone()
    return scope, copy


@pytest.mark.parametrize("is_buffer", [False, True])
def test_a_changed_copy_is_refused(is_buffer: bool):
    scope, copy = scope_with_a_copy(is_buffer)
    scope.check_copies()
    copy.add_(1)
    with pytest.raises(RuntimeError, match="was changed in a forward while all device slots are in use"):
        scope.check_copies()


def test_scopes_belong_to_a_thread():
    running = RunningForwards()
    running.scopes.append(Scope(nn.Identity()))
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lambda: running.scopes).result() == []
