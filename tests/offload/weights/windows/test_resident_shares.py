"""In the turns of a microbatch, modules hold its own share of each parameter."""

import pytest
import torch
from torch import nn

from offload.weights.units.partition import cut
from offload.weights.windows.resident_shares import ResidentShares


@pytest.fixture
def model() -> nn.Module:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False), nn.BatchNorm1d(2))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad_(False)
    return model


def test_uses_of_a_microbatch_are_summed_before_those_of_others(model: nn.Module):
    shares = ResidentShares(cut(model, []).resident)
    weight, uses = model[0].weight, {}
    for place in (0, 1):
        # 1e8 swallows a 1 that is added to it alone.
        for microbatch, factor in enumerate((1e8 * (-1) ** place, 1.0)):
            with shares.turn(microbatch):
                uses[place, microbatch] = factor * model[place].weight.sum()
    sum(uses.values()).backward()
    assert torch.equal(weight.grad, torch.full((2, 2), 2.0))


def test_a_share_is_the_same_in_all_turns_of_its_microbatch(model: nn.Module):
    shares = ResidentShares(cut(model, []).resident)
    held = dict(model.named_parameters(remove_duplicate=False))
    seen = []
    for microbatch in (0, 1, 0):
        with shares.turn(microbatch):
            share = model[0].weight
            assert model[1].weight is share
            assert isinstance(share, nn.Parameter)
            assert share.data_ptr() == held["0.weight"].data_ptr()
            # What does not train is used as it is.
            assert model[2].weight is held["2.weight"]
            assert model[2].bias is not held["2.bias"]
            seen.append(share)
        assert all(
            dict(model.named_parameters(remove_duplicate=False))[name] is tensor for name, tensor in held.items()
        )
    assert seen[0] is seen[2]
    assert seen[0] is not seen[1]
    shares.drop()
    with shares.turn(0):
        assert model[0].weight is not seen[0]


def test_changes_to_a_share_are_changes_to_its_parameter(model: nn.Module):
    shares = ResidentShares(cut(model, []).resident)
    weight = model[0].weight
    with shares.turn(0), torch.no_grad():
        model[0].weight.fill_(3.0)
    assert (weight == 3).all()
    assert weight._version > 0
    with shares.turn(0):
        model[0].weight.data = torch.full((2, 2), 4.0)
    assert model[0].weight is weight
    assert (weight == 4).all()
    new = nn.Parameter(torch.ones(2, 2))
    with shares.turn(1):
        model[0].weight = new
    assert model[0].weight is new
    assert model[1].weight is weight
