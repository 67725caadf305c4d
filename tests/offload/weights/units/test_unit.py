"""Units at home: host memory, what is checked there, and tensors on the device."""

from __future__ import annotations

import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.unfilled import unfilled
from offload.weights.units.unit import OffloadUnit
from tests.offload.helpers.units import data_in


def test_home_keeps_values_dtypes_and_identity():
    model = nn.Sequential(nn.Linear(3, 5), nn.LayerNorm(5).bfloat16())
    values = [p.detach().clone() for p in model.parameters()]
    parameters = list(model.parameters())
    unit = cut(model, [CutPoint("all", model)]).units[0]
    arena = HostArena(torch.device("cpu"))
    unit.bring_home(arena)
    unit.make_gradient_homes(arena)
    for tensor, parameter, value in zip(unit.tensors, model.parameters(), values, strict=True):
        assert torch.equal(parameter, value)
        assert parameter.untyped_storage().data_ptr() == unit.home_of(tensor)[0].data_ptr()
        assert parameter.untyped_storage().nbytes() == parameter.nbytes
    assert all(one is other for one, other in zip(parameters, model.parameters(), strict=True))
    assert [tensor.gradient.memory.dtype for tensor in unit.tensors] == [p.dtype for p in parameters]


def at_home(model: nn.Module) -> OffloadUnit:
    unit = cut(model, [CutPoint("all", model)]).units[0]
    unit.bring_home(HostArena(torch.device("cpu")))
    return unit


def test_meta_tensors_become_memory_at_home_and_keep_what_they_were():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        model[0].bias.requires_grad_(False)
    at_home(model)
    assert not any(tensor.is_meta for tensor in model.state_dict().values())
    assert [p.requires_grad for p in model.parameters()] == [True, False, True, True]
    assert isinstance(model[0].weight, nn.Parameter)
    assert not isinstance(model[1].running_mean, nn.Parameter)
    assert unfilled(model) == list(model.state_dict())


def test_tensors_are_found_by_their_bytes():
    unit = at_home(nn.Sequential(nn.Linear(3, 500), nn.Linear(500, 3)))
    for index, tensor in enumerate(unit.tensors):
        assert unit.index_at(tensor.offset) == unit.index_at(tensor.offset + tensor.nbytes - 1) == index
        assert torch.equal(data_in(tensor, unit.weights.bytes), tensor.host)
    assert unit.nbytes >= unit.tensors[-1].offset + unit.tensors[-1].nbytes


def test_meta_tensors_are_put_back_in_their_modules():
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
        model[1].weight = nn.Parameter(torch.ones(5, device="cpu"))
    before = dict(model.named_parameters()) | dict(model.named_buffers())
    at_home(model).put_back()
    after = dict(model.named_parameters()) | dict(model.named_buffers())
    assert before.keys() == after.keys()
    assert all(after[name] is tensor for name, tensor in before.items())
    assert model[1].weight.tolist() == [1.0] * 5


def test_what_the_user_changes_at_home_shows_buffers_too():
    model = nn.BatchNorm1d(3)
    unit = at_home(model)
    seen = [unit.weights_now()]
    for change in (model.weight.detach().add_, model.running_mean.add_):
        change(1)
        seen.append(unit.weights_now())
    assert seen[0] != seen[1] != seen[2]
    assert unit.weights_now() == seen[2]
