"""A stand-in has the class of its parameter, counts its changes, and refuses what only a leaf can do."""

import pytest
import torch
from torch import nn

from offload.memory.device_slots import DeviceSlots
from offload.streams.registry import Streams
from offload.weights.windows.stand_in import StandIn, StandIns, data_was_taken, forget_data_taken, like_host
from tests.offload.helpers.units import tensor_of, unit_of_two


def test_stand_ins_are_found_by_the_bytes_of_their_tensors():
    unit = unit_of_two()
    unit.tensors[1].offset = unit.tensors[0].nbytes
    found = StandIns([unit])
    assert [each.tensor for each in found[unit]] == unit.tensors
    assert found.at(unit, 0) is found.at(unit, 3) is found[unit][0]
    assert found.at(unit, 4) is found.at(unit, 7) is found[unit][1]


def test_views_of_a_slot_are_the_same_objects(streams: Streams):
    stand_in = StandIn(tensor_of(nn.Parameter(torch.ones(2, 4))))
    first, second = DeviceSlots(2, 64, streams)
    (view,) = stand_in.views_in(first)
    assert (view.shape, view.dtype, view.data_ptr()) == ((2, 4), torch.float32, first.bytes.data_ptr())
    assert stand_in.views_in(first)[0] is view
    assert stand_in.views_in(second)[0].data_ptr() == second.bytes.data_ptr()


def test_changes_at_home_and_on_the_device_show_in_the_state():
    host = nn.Parameter(torch.ones(3))
    stand_in = StandIn(tensor_of(host))
    version, place = stand_in.state
    stand_in.device = torch.zeros(3)
    stand_in.note_installed()
    assert stand_in.state == (version, place)
    assert not stand_in.count_writes()
    stand_in.device.add_(1).mul_(2)
    assert stand_in.state == (version + 2, place)
    assert stand_in.count_writes()
    assert stand_in.writes == 2
    assert stand_in.state == (version + 2, place)
    with torch.no_grad():
        host.add_(1)
    assert stand_in.state == (version + 3, place)
    host.data = torch.zeros(3)
    assert stand_in.state[1] != place


class Special(nn.Parameter):
    pass


@pytest.fixture
def host() -> nn.Parameter:
    parameter = Special(torch.ones(2))
    parameter.mark = "of before"
    return parameter


@pytest.fixture
def stand_in(host: nn.Parameter) -> torch.Tensor:
    return like_host(host * 1, host)


def test_class_and_attributes(host: nn.Parameter, stand_in: torch.Tensor):
    assert isinstance(stand_in, Special)
    assert type(stand_in).__name__ == "Special"
    assert stand_in.mark == "of before"
    stand_in.calls = 3
    assert host.calls == 3
    host.late = "set outside"
    forget_data_taken(stand_in)
    assert stand_in.late == "set outside"


def test_data_that_was_taken_is_noted(stand_in: torch.Tensor):
    assert not data_was_taken(stand_in)
    stand_in.data.zero_()
    assert data_was_taken(stand_in)
    forget_data_taken(stand_in)
    assert not data_was_taken(stand_in)


def test_what_only_a_leaf_can_do_is_refused_in_one_line(stand_in: torch.Tensor):
    def freeze() -> None:
        stand_in.requires_grad = False

    def set_gradient() -> None:
        stand_in.grad = None

    for use, what in (
        (lambda: stand_in.grad, "is asked for its gradient"),
        (set_gradient, "is asked for its gradient"),
        (freeze, "is frozen or unfrozen"),
        (lambda: stand_in.requires_grad_(False), "is frozen or unfrozen"),
        (lambda: stand_in.register_hook(print), "gets a hook on its gradient"),
        (lambda: stand_in.register_post_accumulate_grad_hook(print), "gets a hook on its gradient"),
    ):
        with pytest.raises(RuntimeError, match=f"^a weight that streams {what} inside a forward: do it before"):
            use()
    assert stand_in.requires_grad_(True) is stand_in
    stand_in.retain_grad()
