"""The tensors of a unit: whether their data is at home, and what their user may not do to them."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from offload.memory.host_memory import HostArena
from offload.weights.units.user_changes import take_changes
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
