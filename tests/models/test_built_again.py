"""A model that is built a second time: its parameters take no memory, but for those that are asked for."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models.built_again import as_made, with_buffers, without_weights


class Own(nn.Module):
    def __init__(self, noise: bool = False):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.randn(4))
        self.shift = nn.Parameter(torch.zeros(4))
        self.unfilled = nn.Parameter(torch.empty(4))
        self.register_buffer("table", torch.randn(3) if noise else torch.arange(3))


def test_parameters_have_no_memory_but_those_that_are_kept():
    built = without_weights(Own, {(Own, "shift")})
    assert {name for name, p in built.named_parameters() if not p.is_meta} == {"shift"}
    assert built.table.tolist() == [0, 1, 2]
    assert not nn.Linear(2, 2).weight.is_meta
    with torch.device("meta"):
        assert not without_weights(Own).table.is_meta


def test_random_buffers_are_refused_and_random_numbers_stay():
    state = torch.get_rng_state()
    assert with_buffers(Own).table.tolist() == [0, 1, 2]
    with pytest.raises(ValueError, match="table: its values are random, so build this model on the CPU"):
        with_buffers(lambda: Own(noise=True))
    assert torch.equal(torch.get_rng_state(), state)


def test_values_are_those_of_construction_by_the_seed():
    state, model = torch.get_rng_state(), Own()
    found = [dict(as_made(model, Own, ["scale", "shift"], seed)) for seed in (1, 1, 2)]
    assert torch.equal(found[0]["scale"], found[1]["scale"])
    assert not torch.equal(found[0]["scale"], found[2]["scale"])
    assert found[0]["scale"].std() > 0
    assert not found[0]["shift"].any()
    torch.set_rng_state(state)
    assert torch.equal(Own().scale, model.scale)


def test_memory_that_nothing_is_written_to_is_refused():
    with pytest.raises(ValueError, match="unfilled: its library gives it no first value: load weights instead"):
        dict(as_made(Own(), Own, ["unfilled"], 0))
    assert not torch.are_deterministic_algorithms_enabled()
    assert list(as_made(Own(), lambda: pytest.fail("built"), [], 0)) == []
