"""The tensors of a unit: what their user may not do to them, and who holds their gradients."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.torch_private.torch_internals import count_references
from offload.weights.units.unit_tensor import UnitTensor
from tests.offload.weights.units.test_unit import at_home


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
        unit.gather(HostArena(torch.device("cpu")))
    assert "\n" not in str(refused.value)


def is_held(tensor: UnitTensor) -> bool:
    return count_references(tensor.gradient) > 1


def test_a_buffer_that_is_replaced_streams_if_it_is_alike_and_is_left_to_its_module_otherwise():
    module = nn.Module()
    module.register_buffer("scale", torch.ones(4))
    tensor = at_home(module).tensors[0]
    alike, other = torch.zeros(4), torch.zeros(5)
    module.scale = alike
    tensor.take_replacement(torch.device("cpu"))
    assert tensor.host is alike
    for module.scale in (other, None, alike.double()):
        tensor.take_replacement(torch.device("cpu"))
        assert tensor.host is alike


def test_a_tied_parameter_is_replaced_in_all_places_or_refused():
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))
    model[1].weight = model[0].weight
    tensor = at_home(model).tensors[0]
    model[1].weight = new = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(
        RuntimeError, match=r"^0\.weight was replaced in one place and not in all that share it; detach"
    ):
        tensor.take_replacement(torch.device("cpu"))
    model[0].weight = new
    tensor.take_replacement(torch.device("cpu"))
    assert tensor.host is new


def test_the_users_of_a_gradient_are_seen():
    tensor = at_home(nn.Linear(3, 5)).tensors[0]
    assert not is_held(tensor)
    row = tensor.gradient[0]
    assert is_held(tensor)
    del row
    assert not is_held(tensor)
    array = tensor.gradient.numpy()
    assert is_held(tensor)
    del array
    same = tensor.gradient
    assert is_held(tensor)
    assert same is tensor.gradient
