"""Between steps users replace tensors and give them other data: taken over, or refused."""

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.weights.units.partition import CutPoint, cut
from offload.weights.units.user_changes import counting_fused_updates, take_changes, take_replacement
from tests.offload.helpers.units import data_in
from tests.offload.weights.units.test_unit import at_home


def test_a_buffer_that_is_replaced_streams_if_it_is_alike_and_is_left_to_its_module_otherwise():
    module = nn.Module()
    module.register_buffer("scale", torch.ones(4))
    tensor = at_home(module).tensors[0]
    alike, other = torch.zeros(4), torch.zeros(5)
    module.scale = alike
    take_replacement(tensor, torch.device("cpu"))
    assert tensor.host is alike
    for module.scale in (other, None, alike.double()):
        take_replacement(tensor, torch.device("cpu"))
        assert tensor.host is alike


def test_a_tied_parameter_is_replaced_in_all_places_or_refused():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    tensor = at_home(model).tensors[0]
    model[1].weight = new = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        RuntimeError, match=r"^0\.weight was replaced in one place and not in all that share it; detach"
    ):
        take_replacement(tensor, torch.device("cpu"))
    model[0].weight = new
    take_replacement(tensor, torch.device("cpu"))
    assert tensor.host is new


def test_replaced_parameters_and_other_data_come_home():
    model = nn.Linear(3, 5)
    model.bias.requires_grad_(False)
    arena = HostArena(torch.device("cpu"))
    (unit,) = cut(model, [CutPoint("all", model)]).units
    unit.bring_home(arena)
    block, held = unit.weights, arena.pageable_bytes
    take_changes(unit, arena)
    assert unit.weights is block
    model.bias.requires_grad_(True)
    model.weight.data = torch.ones(5, 3)
    new = model.bias = nn.Parameter(torch.full((5,), 2.0))
    weight, bias = unit.tensors
    assert unit.strays() == [weight]
    take_changes(unit, arena)
    assert unit.strays() == []
    assert unit.weights is not block
    assert bias.host is new
    assert (data_in(weight, unit.weights.bytes) == 1).all()
    assert (data_in(bias, unit.weights.bytes) == 2).all()
    assert arena.pageable_bytes == held


@pytest.mark.parametrize("fused", [False, True])
def test_updates_are_counted(fused: bool):
    used, unused = nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))
    optimizer = torch.optim.AdamW([used, unused], lr=0.1, fused=fused)
    used.grad = torch.ones(4)
    with counting_fused_updates():
        before = used._version, unused._version
        optimizer.step()
        assert used._version > before[0]
        assert unused._version == before[1]
    if fused:
        before = used._version
        optimizer.step()
        assert used._version == before, "torch counts them now: this file has no use any more"
