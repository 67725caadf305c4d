"""How a model is cut."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.runtime.host_memory import HostArena
from offload.weights.partition import CutPoint, cut
from tests.offload.helpers.models import Stack


def test_a_unit_holds_the_parameters_below_its_root():
    model = Stack()
    parts = cut(model, [CutPoint("blocks.0", model.blocks[0]), CutPoint("head", model.head)])
    assert [unit.name for unit in parts.units] == ["blocks.0", "head"]
    assert [tensor.name for tensor in parts.units[0].tensors][:2] == [
        "blocks.0.norm.weight",
        "blocks.0.norm.bias",
    ]
    assert parts.unit_bytes + parts.resident_bytes >= sum(p.nbytes for p in model.parameters())
    windows = [window.module for window in parts.windows]
    assert windows[0] is model.blocks[0]
    assert model.blocks[0].up in windows


def test_weights_shared_between_roots_have_one_home_and_two_windows():
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    model = nn.Sequential(first, second)
    parts = cut(model, [CutPoint("0", first), CutPoint("1", second)])
    assert [[tensor.name for tensor in unit.tensors] for unit in parts.units] == [
        ["0.weight", "0.bias"],
        ["1.bias"],
    ]
    assert [len(window.units) for window in parts.windows] == [1, 2]


def test_weights_shared_with_the_rest_of_the_model_stay_resident():
    model = nn.ModuleDict({"embed": nn.Embedding(4, 3), "head": nn.Linear(3, 4, bias=False)})
    model["head"].weight = model["embed"].weight
    parts = cut(model, [CutPoint("head", model["head"])])
    assert not parts.units
    assert len(parts.resident) == 1


def test_overlapping_roots_are_refused():
    model = Stack()
    with pytest.raises(ValueError, match=r"blocks\.0\.up lies inside blocks\.0"):
        cut(model, [CutPoint("blocks.0", model.blocks[0]), CutPoint("blocks.0.up", model.blocks[0].up)])


def test_home_keeps_values_dtypes_and_identity():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5).bfloat16())
    values = [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())
    unit = cut(model, [CutPoint("all", model)]).units[0]
    unit.bring_home(HostArena(torch.device("cpu")))
    for parameter, value in zip(model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() == unit.weights.bytes.data_ptr()
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert [tensor.gradient.dtype for tensor in unit.tensors] == [p.dtype for p in parameters]
