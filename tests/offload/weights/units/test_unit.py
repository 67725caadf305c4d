"""Units at home: host memory, their tensors, the memory of gradients, and what is checked there."""

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.torch_private.torch_internals import count_references
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.placement import unfilled
from offload.weights.units.unit import OffloadUnit, UnitTensor
from offload.weights.units.user_changes import take_changes
from tests.offload.helpers.units import data_in, tensor_of


def is_held(tensor: UnitTensor) -> bool:
    return count_references(tensor.gradient.memory) > 1


def test_the_users_of_a_gradient_are_seen():
    tensor = tensor_of(nn.Parameter(torch.ones(5, 3)))
    tensor.gradient.make_memory(HostArena(torch.device("cpu")))
    assert not is_held(tensor)
    row = tensor.gradient.memory[0]
    assert is_held(tensor)
    del row
    assert not is_held(tensor)
    array = tensor.gradient.memory.numpy()
    assert is_held(tensor)
    del array
    same = tensor.gradient.memory
    assert is_held(tensor)
    assert same is tensor.gradient.memory


def test_memory_of_its_own_has_the_shape_and_dtype_of_the_parameter():
    tensor, arena = tensor_of(nn.Parameter(torch.ones(5, 3, dtype=torch.bfloat16))), HostArena(torch.device("cpu"))
    tensor.gradient.make_memory(arena)
    memory = tensor.gradient.memory
    assert (memory.shape, memory.dtype) == ((5, 3), torch.bfloat16)
    assert arena.pageable_bytes == tensor.nbytes


@pytest.mark.parametrize(
    "change",
    [
        lambda model: model.double(),
        lambda model: model.to("meta"),
        lambda model: setattr(model, "bias", nn.Parameter(torch.ones(4))),
    ],
)
def test_what_cannot_be_streamed_is_refused_in_one_line(change):
    model = nn.Linear(3, 5)
    unit = at_home(model)
    change(model)
    with pytest.raises(RuntimeError, match=r"^(weight|bias) is .* when the mode was attached: it was moved") as refused:
        take_changes(unit, HostArena(torch.device("cpu")))
    assert "\n" not in str(refused.value)


def test_data_that_the_user_gives_is_not_at_home():
    model = nn.Linear(4, 4)
    weight, bias = at_home(model).tensors
    values = model.weight.detach().clone()
    for data in (model.weight.data.t(), values):
        model.weight.data = data
        assert not weight.is_home
    assert bias.is_home
    memory = torch.empty(4, 4)
    weight.move_into([memory])
    assert weight.is_home
    assert model.weight.data_ptr() == memory.data_ptr()
    assert torch.equal(model.weight, values)


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
